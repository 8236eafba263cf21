//! Checks of a call's tensors, before anything is launched.

use cudarc::driver::sys::CUstream;

use super::{Plan, WORKSPACE_ALIGNMENT, Workspace};
use crate::attention::{Gradients, Inputs, Output, Saved};
use crate::cuda::options::sums_bias_gradient;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::options::OptionTensors;
use crate::tensor::{Raw, TensorRef};

impl<T: Element> Plan<T> {
    /// Checks the tensors of a forward call that runs on a device.
    pub(super) fn check_forward(
        &self,
        inputs: &Inputs<'_, T>,
        output: &Output<'_, T>,
        stream: CUstream,
    ) -> Result<()> {
        self.check_inputs(inputs, stream)?;
        let [.., o] = self.attention.tensor_dims();
        self.check("o", &output.o.raw, &o, size_of::<T>(), stream)?;
        match &output.lse {
            Some(lse) => self.check_lse("lse", &lse.raw, stream),
            None => Ok(()),
        }
    }

    /// Checks the tensors of a backward call that runs on a device.
    pub(super) fn check_backward(
        &self,
        saved: &Saved<'_, T>,
        d_o: &TensorRef<'_, T>,
        d_lse: Option<&TensorRef<'_, f32>>,
        gradients: &Gradients<'_, T>,
        stream: CUstream,
    ) -> Result<()> {
        self.check_inputs(&saved.inputs, stream)?;
        let [q, k, v, o] = self.attention.tensor_dims();
        self.check("o", &saved.o.raw, &o, size_of::<T>(), stream)?;
        self.check_lse("lse", &saved.lse.raw, stream)?;
        self.check("d_o", &d_o.raw, &o, size_of::<T>(), stream)?;
        if let Some(d_lse) = d_lse {
            self.check_lse("d_lse", &d_lse.raw, stream)?;
        }
        let wanted =
            [("dq", &gradients.dq, &q), ("dk", &gradients.dk, &k), ("dv", &gradients.dv, &v)];
        for (name, gradient, dims) in wanted {
            if let Some(gradient) = gradient {
                self.check(name, &gradient.raw, dims, size_of::<T>(), stream)?;
            }
        }
        self.check_option_gradients(gradients, stream)
    }

    /// Checks the gradients of options: declared, of the options' dimensions, and in an order if
    /// one is asked for.
    fn check_option_gradients(&self, gradients: &Gradients<'_, T>, stream: CUstream) -> Result<()> {
        let attention = &self.attention;
        let no_such = |tensor| Error::Presence {
            tensor,
            problem: "its gradient is asked for, but the call declares no such option",
        };
        if let Some(dbias) = &gradients.dbias {
            let axes = attention.bias.ok_or_else(|| no_such("dbias"))?;
            let dims = axes.dims(&attention.shape);
            self.check("dbias", &dbias.raw, &dims, size_of::<f32>(), stream)?;
            if attention.deterministic && sums_bias_gradient(attention) {
                return Err(Error::Unsupported {
                    what: "a deterministic gradient of a bias that is broadcast".to_owned(),
                    device: self.explanation.device.clone(),
                    reasons: "its sums have no fixed order: leave `deterministic` out, give the \
                              bias every axis, or use the cpu"
                        .to_owned(),
                });
            }
        }
        if let Some(dsink) = &gradients.dsink {
            if !attention.sink {
                return Err(no_such("dsink"));
            }
            self.check("dsink", &dsink.raw, &[attention.shape.q_heads], size_of::<f32>(), stream)?;
        }
        Ok(())
    }

    fn check_inputs(&self, inputs: &Inputs<'_, T>, stream: CUstream) -> Result<()> {
        let [q, k, v, _] = self.attention.tensor_dims();
        self.check("q", &inputs.q.raw, &q, size_of::<T>(), stream)?;
        self.check("k", &inputs.k.raw, &k, size_of::<T>(), stream)?;
        self.check("v", &inputs.v.raw, &v, size_of::<T>(), stream)?;
        let given = OptionTensors::new(&self.attention, inputs)?;
        given.check_on_device(&self.attention, self.place, |name, raw, dims, element_bytes| {
            self.check(name, raw, dims, element_bytes, stream)
        })
    }

    /// lse or its gradient.
    fn check_lse(&self, name: &'static str, raw: &Raw, stream: CUstream) -> Result<()> {
        self.check(name, raw, &self.attention.lse_dims(), size_of::<f32>(), stream)?;
        if !raw.is_contiguous() {
            return Err(Error::argument(
                name,
                format!("strides {:?}", raw.strides()),
                "contiguous",
            ));
        }
        Ok(())
    }

    /// The address of a workspace that is of `needs` bytes, or 0 where none is needed.
    pub(super) fn check_workspace(
        &self,
        workspace: &Workspace<'_>,
        needs: usize,
        stream: CUstream,
    ) -> Result<u64> {
        let Some(raw) = workspace.raw.filter(|_| needs > 0) else {
            return if needs == 0 { Ok(0) } else { Err(Error::Workspace { had: 0, needs }) };
        };
        let had = raw.dims().iter().fold(1, |all: usize, dim| all.saturating_mul(*dim));
        if !raw.is_contiguous() {
            return Err(Error::argument(
                "workspace",
                format!("strides {:?}", raw.strides()),
                "contiguous",
            ));
        }
        if had < needs {
            return Err(Error::Workspace { had, needs });
        }
        if raw.place != self.place {
            return Err(Error::Placement {
                tensor: "workspace",
                had: raw.place.to_string(),
                needs: self.place.to_string(),
            });
        }
        if !raw.address.is_multiple_of(WORKSPACE_ALIGNMENT) {
            return Err(Error::argument(
                "workspace",
                format!("address {:#x}", raw.address),
                format!("a multiple of {WORKSPACE_ALIGNMENT}"),
            ));
        }
        check_order("workspace", &raw, stream)?;
        Ok(raw.address as u64)
    }

    pub(super) fn check(
        &self,
        tensor: &'static str,
        raw: &Raw,
        dims: &[usize],
        element_bytes: usize,
        stream: CUstream,
    ) -> Result<()> {
        if raw.dims() != dims {
            return Err(Error::Dimensions {
                tensor,
                had: raw.dims().to_vec(),
                needs: dims.to_vec(),
            });
        }
        let last = dims.len() - 1;
        if raw.strides()[last] != 1 && dims[last] > 1 {
            return Err(Error::ChannelStride { tensor, had: raw.strides()[last] });
        }
        if raw.place != self.place && !raw.is_empty() {
            return Err(Error::Placement {
                tensor,
                had: raw.place.to_string(),
                needs: self.place.to_string(),
            });
        }
        if !raw.address.is_multiple_of(element_bytes) {
            return Err(Error::argument(
                tensor,
                format!("address {:#x}", raw.address),
                format!("aligned to its elements of {element_bytes} bytes"),
            ));
        }
        check_order(tensor, raw, stream)
    }
}

/// cudarc orders a tensor's accesses on one stream; work on another would race with it.
fn check_order(tensor: &'static str, raw: &Raw, stream: CUstream) -> Result<()> {
    match raw.stream {
        Some(ordered) if ordered != stream as usize => Err(Error::Placement {
            tensor,
            had: "another stream, by cudarc's events".to_owned(),
            needs: "the stream that the plan runs on".to_owned(),
        }),
        _ => Ok(()),
    }
}
