//! The tensors that options take: given if and only if declared, and of which dimensions. The CPU
//! and the GPU start from the same list.

use crate::attention::{Attention, Inputs, Layout, Lengths, Packed};
use crate::error::{Error, Result};
use crate::lengths;
use crate::tensor::{Place, Raw, TensorRef};

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
        let has_key_lengths = attention.layout == Layout::KeyLengths;
        let is_packed = matches!(attention.layout, Layout::Packed { .. });
        let slope_dims = |slopes: &TensorRef<'_, f32>| match slopes.dims().len() {
            2 => vec![shape.batch, shape.q_heads],
            _ => vec![shape.q_heads],
        };
        Ok(Self {
            bias: bias.zip(attention.bias.map(|axes| axes.dims(shape).to_vec())),
            boolean_mask: boolean_mask
                .zip(attention.boolean_mask.map(|axes| axes.dims(shape).to_vec())),
            alibi_slopes: slopes.map(|slopes| (slopes, slope_dims(slopes))),
            sink: sink.map(|sink| (sink, vec![shape.q_heads])),
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
