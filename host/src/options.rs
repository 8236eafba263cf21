//! The tensors that options take: given if and only if declared, and of which dimensions. The CPU
//! and the GPU start from the same list.

use crate::attention::{Attention, DropoutState, Inputs, Layout, Lengths, Packed};
use crate::cpu::rows::Rows;
use crate::error::{Error, Result};
use crate::lengths;
use crate::tensor::{Place, Raw, TensorRef};
use ferroflash_core::dropout::DropoutMask;

/// A tensor that was given, and the dimensions it needs.
type Given<'i, 'a, V> = Option<(&'i TensorRef<'a, V>, Vec<usize>)>;

/// The tensors and lengths of a call's options.
pub(crate) struct OptionTensors<'i, 'a> {
    /// Additive bias.
    pub(crate) bias: Given<'i, 'a, f32>,
    /// Boolean mask.
    pub(crate) boolean_mask: Given<'i, 'a, u8>,
    /// ALiBi slopes.
    pub(crate) alibi_slopes: Given<'i, 'a, f32>,
    /// Sink logits.
    pub(crate) sink: Given<'i, 'a, f32>,
    /// Seed and offset of the dropout.
    pub(crate) dropout_state: Option<&'i TensorRef<'a, u64>>,
    /// Keys of each item.
    pub(crate) key_lengths: Option<&'i Lengths<'a>>,
    /// Offsets of packed items.
    pub(crate) packed: Option<&'i Packed<'a>>,
}

impl<'i, 'a> OptionTensors<'i, 'a> {
    /// The options' tensors among `inputs`.
    ///
    /// # Errors
    /// [`Error::Presence`] for one that is declared and missing, or given and not declared.
    pub(crate) fn new<T>(attention: &Attention, inputs: &'i Inputs<'a, T>) -> Result<Self> {
        let shape = &attention.shape;
        let bias = declared(&inputs.bias, attention.bias.is_some(), "bias")?;
        let boolean_mask =
            declared(&inputs.boolean_mask, attention.boolean_mask.is_some(), "boolean_mask")?;
        let slopes = declared(&inputs.alibi_slopes, attention.alibi, "alibi_slopes")?;
        let sink = declared(&inputs.sink, attention.sink, "sink")?;
        let dropout_state = attention.declared_state(inputs.dropout_state.as_ref())?;
        let has_key_lengths = attention.layout == Layout::KeyLengths;
        let is_packed = matches!(attention.layout, Layout::Packed { .. });
        let slope_dims = |slopes: &TensorRef<'_, f32>| match slopes.dims().len() {
            2 => vec![shape.batch, shape.q_heads],
            _ => vec![shape.q_heads],
        };
        Ok(Self {
            bias: bias.zip(attention.bias.map(|axes| axes.dims(shape).to_vec())),
            boolean_mask: boolean_mask.zip(attention.mask_dims().map(|dims| dims.to_vec())),
            alibi_slopes: slopes.map(|slopes| (slopes, slope_dims(slopes))),
            sink: sink.map(|sink| (sink, vec![shape.q_heads])),
            dropout_state,
            key_lengths: declared(&inputs.key_lengths, has_key_lengths, "key_lengths")?,
            packed: declared(&inputs.packed, is_packed, "packed")?,
        })
    }
}

impl OptionTensors<'_, '_> {
    /// Checks the tensors of a call that runs on a device at `place`, each by `check`: its name,
    /// it, the dimensions it needs and the bytes of an element.
    ///
    /// # Errors
    /// The first error of `check`; [`Error::Argument`] for malformed lengths in host memory, and
    /// [`Error::Placement`] for any others there.
    pub(crate) fn check_on_device(
        &self,
        attention: &Attention,
        place: Place,
        check: impl Fn(&'static str, &Raw, &[usize], usize) -> Result<()>,
    ) -> Result<()> {
        for (name, tensor) in
            [("bias", &self.bias), ("alibi_slopes", &self.alibi_slopes), ("sink", &self.sink)]
        {
            if let Some((tensor, dims)) = tensor {
                check(name, &tensor.raw, dims, size_of::<f32>())?;
            }
        }
        if let Some((mask, dims)) = &self.boolean_mask {
            check("boolean_mask", &mask.raw, dims, size_of::<u8>())?;
        }
        match self.dropout_state {
            // It is read at the call.
            Some(state) if state.place() == Place::Host => drop(read_state(state)?),
            Some(state) => check("dropout_state", &state.raw, &[2], size_of::<u64>())?,
            None => {}
        }
        lengths::check_on_host(attention, self.key_lengths, self.packed)?;
        let batch = attention.shape.batch;
        let mut all = vec![("key_lengths", self.key_lengths, batch)];
        if let Some(packed) = self.packed {
            all.extend([
                ("cu_q", Some(&packed.cu_q), batch + 1),
                ("cu_k", Some(&packed.cu_k), batch + 1),
                ("used_q", packed.used_q.as_ref(), batch),
                ("used_k", packed.used_k.as_ref(), batch),
            ]);
        }
        for (name, lengths, count) in all {
            match lengths {
                None => {}
                Some(Lengths::Device(tensor)) => {
                    check(name, &tensor.raw, &[count], size_of::<i32>())?;
                }
                Some(Lengths::Host(_)) => {
                    return Err(Error::Placement {
                        tensor: name,
                        had: Place::Host.to_string(),
                        needs: format!("{place}; Plan::run copies lengths there"),
                    });
                }
            }
        }
        Ok(())
    }
}

impl Attention {
    /// The dropout's state among the inputs: given if and only if it was declared.
    pub(crate) fn declared_state<'t, 'a>(
        &self,
        state: Option<&'t TensorRef<'a, u64>>,
    ) -> Result<Option<&'t TensorRef<'a, u64>>> {
        let is_declared = self.dropout.is_some_and(|dropout| dropout.state == DropoutState::Given);
        Ok(declared(&state, is_declared, "dropout_state")?.copied())
    }

    /// The dropout mask, if the call drops anything. What a state in device memory holds is not
    /// known here: it then is the mask of another seed and offset.
    ///
    /// # Errors
    /// A state in host memory that is not two contiguous integers.
    pub(crate) fn dropout_mask(
        &self,
        state: Option<&TensorRef<'_, u64>>,
    ) -> Result<Option<DropoutMask>> {
        let Some(dropout) = self.dropout else { return Ok(None) };
        let (seed, offset) = match (dropout.state, state) {
            (DropoutState::Value { seed, offset }, _) => (seed, offset),
            (DropoutState::Given, Some(state)) if state.place() == Place::Host => {
                read_state(state)?
            }
            (DropoutState::Given, _) => (0, 0),
        };
        Ok(Some(DropoutMask::new(dropout.probability, seed, offset)))
    }
}

/// Seed and offset that lie in host memory.
pub(crate) fn read_state(state: &TensorRef<'_, u64>) -> Result<(u64, u64)> {
    let rows = Rows::new(state, "dropout_state", &[2])?;
    match rows.row([0; 3]) {
        [seed, offset] => Ok((*seed, *offset)),
        other => Err(Error::argument("dropout_state", format!("{} values", other.len()), "two")),
    }
}

/// The tensor of an option: given if and only if it was declared.
fn declared<'t, T>(
    tensor: &'t Option<T>,
    declared: bool,
    name: &'static str,
) -> Result<Option<&'t T>> {
    match (tensor, declared) {
        (None, true) => Err(Error::Presence {
            tensor: name,
            problem: "the call's options declare it, but it was not given",
        }),
        (Some(_), false) => Err(Error::Presence {
            tensor: name,
            problem: "it was given, but the call's options do not declare it",
        }),
        (tensor, _) => Ok(tensor.as_ref()),
    }
}
