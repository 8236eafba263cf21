//! Where a call runs, and running its forward pass.

use std::time::Instant;

use ferroflash::cpu::tiled;
use ferroflash::{
    Attention, Buffer, Device, Error, Explanation, Inputs, Output, Plan, Preference, TensorMut,
};

use crate::call::Tensors;
use crate::failure::{Failure, Result};
use crate::file::{Stored, reserve};
use crate::options::{DeviceChoice, form};
use crate::progress::Progress;

/// A device and the plan made for it.
pub(crate) struct Chosen<T> {
    device: Device,
    plan: Plan<T>,
    /// Why the device is not the one that `auto` would rather have.
    fallback: Option<String>,
}

/// What a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The forward pass alone.
    Forward,
    /// The backward pass as well: a device that has none will not do.
    Gradients,
    /// To say what would run.
    Explanation,
}

/// The device that the user wants.
pub(crate) fn open(choice: DeviceChoice) -> Result<Device> {
    match choice {
        DeviceChoice::Auto => Ok(Device::best()),
        DeviceChoice::Cpu => Ok(Device::cpu()),
        DeviceChoice::Cuda(ordinal) => cuda(ordinal),
    }
}

/// The GPU of `--device cuda:ORDINAL`.
fn cuda(ordinal: usize) -> Result<Device> {
    let choice = DeviceChoice::Cuda(ordinal);
    Device::cuda(ordinal).map_err(|error| match error {
        Error::NoDriver(why) => {
            let had = format!("{choice}, but there is no usable NVIDIA driver ({why})");
            Failure::input("--device", format!("{had}; auto and cpu need none"))
        }
        Error::NoDevice { count, .. } => {
            let needs = match count {
                0 => "cpu or auto: the driver sees no GPU".to_owned(),
                _ => format!("under cuda:{count}, as many as the driver sees"),
            };
            Failure::needs("--device", choice, needs)
        }
        other => other.into(),
    })
}

impl<T: Stored> Chosen<T> {
    /// Plans the call where the user wants it.
    pub(crate) fn new(
        choice: DeviceChoice,
        attention: &Attention,
        purpose: Purpose,
    ) -> Result<Self> {
        // Whatever is wrong with the call itself is found out first.
        let cpu = attention.plan::<T>(&Device::cpu())?;
        let on_cpu = |fallback| Ok(Self { device: Device::cpu(), plan: cpu, fallback });
        let forward_only = purpose == Purpose::Forward;
        let preference = Preference { form: form()?, forward_only, ..Preference::default() };
        let plan_on = |device: &Device| -> std::result::Result<Plan<T>, Error> {
            let plan = attention.plan_with::<T>(device, preference)?;
            match (&plan.explain().no_backward, purpose) {
                (Some(why), Purpose::Gradients) => Err(Error::Unsupported {
                    what: "the backward pass".to_owned(),
                    device: plan.explain().device.clone(),
                    reasons: why.clone(),
                }),
                _ => Ok(plan),
            }
        };
        match choice {
            DeviceChoice::Cpu => on_cpu(None),
            DeviceChoice::Auto => match Device::cuda(0) {
                Err(why) => on_cpu(Some(format!("there is no GPU: {why}"))),
                Ok(device) => match plan_on(&device) {
                    Ok(plan) => Ok(Self { device, plan, fallback: None }),
                    Err(why) => on_cpu(Some(format!("cuda:0 does not: {why}"))),
                },
            },
            DeviceChoice::Cuda(ordinal) => {
                let device = cuda(ordinal)?;
                let plan = plan_on(&device)?;
                Ok(Self { device, plan, fallback: None })
            }
        }
    }

    /// What the plan does and why.
    pub(crate) fn explanation(&self) -> Explanation {
        let mut explanation = self.plan.explain().clone();
        if let Some(why) = &self.fallback {
            explanation.reason.clone_from(why);
        }
        explanation
    }

    /// The plan.
    pub(crate) fn plan(&self) -> &Plan<T> {
        &self.plan
    }

    /// The GPU, if it is one.
    pub(crate) fn gpu(&self) -> Option<&Device> {
        self.device.context().map(|_| &self.device)
    }

    /// Why the device is not the one that `auto` would rather have.
    pub(crate) fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// The device, as in `--device`.
    pub(crate) fn device(&self) -> String {
        self.device.place().to_string()
    }

    /// Computes o and lse.
    pub(crate) fn run(&self, tensors: &Tensors<T>) -> Result<Results<T>> {
        if self.device.context().is_some() {
            self.run_on_gpu(tensors)
        } else {
            forward_on_cpu(self.plan.attention(), tensors)
        }
    }

    fn run_on_gpu(&self, tensors: &Tensors<T>) -> Result<Results<T>> {
        let Tensors { shape, axes, .. } = tensors;
        let stream = self.device.default_stream();
        let [q, k, v] =
            [&tensors.q, &tensors.k, &tensors.v].map(|data| Buffer::from_slice(&self.device, data));
        let (q, k, v) = (q?, k?, v?);
        let mut o = Buffer::<T>::new(&self.device, shape.o_dims().iter().product())?;
        let mut lse = Buffer::<f32>::new(&self.device, shape.lse_dims().iter().product())?;
        stream.synchronize()?;

        let begun = Instant::now();
        {
            let inputs = Inputs::new(
                axes.view(shape.q_dims(), |dims| q.tensor(&stream, dims))?,
                axes.view(shape.k_dims(), |dims| k.tensor(&stream, dims))?,
                axes.view(shape.v_dims(), |dims| v.tensor(&stream, dims))?,
            );
            let mut output = Output {
                o: axes.view_mut(shape.o_dims(), |dims| o.tensor_mut(&stream, dims))?,
                lse: Some(lse.tensor_mut(&stream, &shape.lse_dims())?),
            };
            self.plan.run(&stream, inputs, &mut output)?;
        }
        stream.synchronize()?;
        let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
        Ok(Results { o: o.to_vec(&stream)?, lse: lse.to_vec(&stream)?, milliseconds })
    }
}

/// What a forward call gives; o lies as q does in its file.
pub(crate) struct Results<T> {
    pub(crate) o: Vec<T>,
    pub(crate) lse: Vec<f32>,
    /// Of the one run, its kernel loaded and its tensors in place.
    pub(crate) milliseconds: f64,
}

/// Computes o and lse on the CPU.
pub(crate) fn forward_on_cpu<T: Stored>(
    attention: &Attention,
    tensors: &Tensors<T>,
) -> Result<Results<T>> {
    let Tensors { shape, axes, .. } = tensors;
    let mut o = zeros::<T>("o", &shape.o_dims())?;
    let mut lse = zeros::<f32>("lse", &shape.lse_dims())?;
    let progress = Progress::of("attention on the cpu");
    let begun = Instant::now();
    let mut output = Output {
        o: axes.view_mut(shape.o_dims(), |dims| TensorMut::host(&mut o, dims))?,
        lse: Some(TensorMut::host(&mut lse, &shape.lse_dims())?),
    };
    tiled::forward_with_progress(
        attention,
        &tensors.inputs()?,
        &mut output,
        None,
        &|done, total| progress.tell(done, total),
    )?;
    drop(output);
    let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
    Ok(Results { o, lse, milliseconds })
}

/// Zeros for a tensor of dimensions `dims`.
pub(crate) fn zeros<T: Stored>(name: &str, dims: &[usize]) -> Result<Vec<T>> {
    let elements = dims.iter().fold(1_usize, |product, &dim| product.saturating_mul(dim));
    let elements = if dims.contains(&0) { 0 } else { elements };
    let mut data = reserve(name, elements)?;
    data.resize(elements, T::default());
    Ok(data)
}
