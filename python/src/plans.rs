//! Plans, made once for each kind of call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ferroflash::{
    Attention, Device, Element, Error, Mask, Place, Plan, Preference, Result, Scale, Shape,
};
use half::{bf16, f16};

/// Everything that a plan depends on but the element type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Description {
    pub(crate) shape: Shape,
    pub(crate) mask: Mask,
    /// Factor of every score; `None` for `1 / √head_dim`.
    pub(crate) scale: Option<f32>,
    /// Cap of every score; 0 for none.
    pub(crate) softcap: f32,
    pub(crate) alibi: bool,
    pub(crate) place: Place,
}

/// A description with its floats as bits, so that it can be looked up.
type Key = (Shape, Mask, Option<u32>, u32, bool, Place);

impl Description {
    fn key(&self) -> Key {
        let scale = self.scale.map(f32::to_bits);
        (self.shape, self.mask, scale, self.softcap.to_bits(), self.alibi, self.place)
    }

    fn attention(&self) -> Attention {
        let mut attention = Attention::new(self.shape).mask(self.mask);
        if let Some(factor) = self.scale {
            attention = attention.scale(Scale::Factor(factor));
        }
        if self.softcap != 0.0 {
            attention = attention.softcap(self.softcap);
        }
        if self.alibi {
            attention = attention.alibi();
        }
        attention
    }

    /// Makes the plan, which loads its kernel.
    pub(crate) fn plan<T: Element>(&self) -> Result<Plan<T>> {
        let preference = Preference { kernel: preferred_kernel(), form: None, forward_only: true };
        self.attention().plan_with(&device(self.place)?, preference)
    }
}

/// A kernel, or a family of them, that benchmarks insist on: `FERROFLASH_KERNEL`, read once.
fn preferred_kernel() -> Option<&'static str> {
    static NAME: OnceLock<Option<String>> = OnceLock::new();
    NAME.get_or_init(|| std::env::var("FERROFLASH_KERNEL").ok()).as_deref()
}

/// The device at `place`.
pub(crate) fn device(place: Place) -> Result<Device> {
    match place {
        Place::Host => Ok(Device::cpu()),
        Place::Cuda(ordinal) => Device::cuda(ordinal),
    }
}

/// Plans of one element type.
#[derive(Default)]
pub(crate) struct Plans<T>(Mutex<HashMap<Key, Arc<Plan<T>>>>);

/// Plans kept; a program whose shapes never repeat forgets them all now and then.
const MOST_PLANS: usize = 1024;

impl<T: Element> Plans<T> {
    /// The plan of `description`, made at its first use.
    pub(crate) fn get(&self, description: &Description) -> Result<Arc<Plan<T>>> {
        let key = description.key();
        if let Some(plan) = self.lock().get(&key) {
            return Ok(plan.clone());
        }
        // Not under the lock: loading a kernel takes milliseconds. Two threads may both make it.
        let plan = Arc::new(description.plan::<T>()?);
        let mut plans = self.lock();
        if plans.len() >= MOST_PLANS {
            plans.clear();
        }
        Ok(plans.entry(key).or_insert(plan).clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Arc<Plan<T>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An element type with its plans.
pub(crate) trait Planned: Element {
    /// The plans of this process.
    fn plans() -> &'static Plans<Self>;
}

macro_rules! planned {
    ($($element:ty),*) => {$(
        impl Planned for $element {
            fn plans() -> &'static Plans<Self> {
                static PLANS: OnceLock<Plans<$element>> = OnceLock::new();
                PLANS.get_or_init(|| Plans(Mutex::default()))
            }
        }
    )*};
}
planned!(bf16, f16, f32);

/// Refuses a mask side under −1, which means unbounded.
pub(crate) fn side(keys: i64) -> Result<Option<usize>> {
    match keys {
        -1 => Ok(None),
        _ => usize::try_from(keys).map(Some).map_err(|_| Error::Argument {
            argument: "window_size",
            had: format!("a side of {keys}"),
            needs: "two integers: keys before and after the diagonal, -1 for all".to_owned(),
        }),
    }
}
