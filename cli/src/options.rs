//! The options of a call, as they are typed.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, ValueEnum};
use ferroflash::{Align, Attention, Form, Mask, Scale, Shape};

use crate::call::Inputs;
use crate::failure::{Failure, Result};
use crate::file::{Safetensors, open_npy};

/// Where q, k and v are.
#[derive(Args)]
pub(crate) struct Sources {
    /// A .safetensors that holds q, k and v
    #[arg(required_unless_present = "q", conflicts_with_all = ["q", "k", "v"])]
    file: Option<PathBuf>,
    /// q as a .npy, in place of FILE
    #[arg(long, value_name = "FILE", requires_all = ["k", "v"])]
    q: Option<PathBuf>,
    /// k as a .npy
    #[arg(long, value_name = "FILE", requires_all = ["q", "v"])]
    k: Option<PathBuf>,
    /// v as a .npy
    #[arg(long, value_name = "FILE", requires_all = ["q", "k"])]
    v: Option<PathBuf>,
}

impl Sources {
    /// The files that are read.
    pub(crate) fn paths(&self) -> Vec<&Path> {
        [&self.file, &self.q, &self.k, &self.v].into_iter().flatten().map(|p| &**p).collect()
    }

    /// Reads the headers of q, k and v.
    pub(crate) fn open(&self, order: AxisOrder) -> Result<Inputs> {
        let [q, k, v] = match (&self.file, &self.q, &self.k, &self.v) {
            (Some(file), ..) => {
                let file = Safetensors::open(file)?;
                [file.entry("q")?, file.entry("k")?, file.entry("v")?]
            }
            (None, Some(q), Some(k), Some(v)) => {
                [open_npy("q", q)?, open_npy("k", k)?, open_npy("v", v)?]
            }
            _ => return Err(Failure::input("FILE", "neither it nor --q, --k and --v were given")),
        };
        Inputs::new(q, k, v, order)
    }
}

/// The order of a tensor's axes in its file. Without a batch axis, the batch is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AxisOrder {
    /// [batch, sequence, head, channel]
    Bshd,
    /// [batch, head, sequence, channel]
    Bhsd,
}

/// What `--causal` may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Causal {
    /// Every key is visible
    None,
    /// Row i sees keys up to i
    TopLeft,
    /// The last row sees every key
    BottomRight,
}

/// What `--align` may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Alignment {
    /// The diagonal starts at the first row and the first key
    TopLeft,
    /// The diagonal ends at the last row and the last key
    BottomRight,
}

impl Alignment {
    const fn align(self) -> Align {
        match self {
            Alignment::TopLeft => Align::TopLeft,
            Alignment::BottomRight => Align::BottomRight,
        }
    }

    /// As it is typed.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Alignment::TopLeft => "top-left",
            Alignment::BottomRight => "bottom-right",
        }
    }
}

/// Which keys a row may see.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct MaskOptions {
    /// Hide the keys after a row's diagonal
    #[arg(long, value_enum, default_value = "none", value_name = "ALIGN")]
    pub(crate) causal: Causal,
    /// Show a row LEFT keys before its diagonal and RIGHT after it; -1 is unbounded;
    /// with --causal both apply
    #[arg(long, value_name = "LEFT,RIGHT", allow_hyphen_values = true)]
    pub(crate) window: Option<Window>,
    /// The window's diagonal, if --causal does not say and q and k differ in length
    #[arg(long, value_enum, value_name = "ALIGN")]
    pub(crate) align: Option<Alignment>,
}

/// What is computed.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) mask: MaskOptions,
    /// Factor of the scores [default: 1 / √head_dim]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) scale: Option<f32>,
    /// Where it runs: auto, cpu or cuda:N
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: DeviceChoice,
}

impl Options {
    /// The call's description.
    pub(crate) fn attention(&self, shape: Shape) -> Result<Attention> {
        let mut attention = Attention::new(shape).mask(self.mask.of(&shape)?);
        if let Some(factor) = self.scale {
            attention = attention.scale(Scale::Factor(factor));
        }
        Ok(attention)
    }
}

impl MaskOptions {
    /// The mask of a call of these sizes.
    pub(crate) fn of(&self, shape: &Shape) -> Result<Mask> {
        let causal = match self.causal {
            Causal::None => None,
            Causal::TopLeft => Some(Align::TopLeft),
            Causal::BottomRight => Some(Align::BottomRight),
        };
        let align = match (causal, self.align.map(Alignment::align)) {
            (Some(causal), Some(own)) if causal != own => {
                return Err(Failure::needs(
                    "--align",
                    "is not --causal's",
                    "the same, or left out",
                ));
            }
            (Some(align), _) | (None, Some(align)) => Some(align),
            (None, None) => None,
        };
        match (self.window, align) {
            (None, _) => Ok(causal.map_or(Mask::full(), Mask::causal)),
            (Some(window), Some(align)) => {
                let right = if causal.is_some() { Some(0) } else { window.right };
                Ok(Mask::full().aligned(align).window(window.left, right))
            }
            (Some(window), None) if shape.q_len == shape.kv_len => {
                Ok(Mask::full().window(window.left, window.right))
            }
            (Some(_), None) => {
                let had = format!(
                    "not given, though a window of {} rows and {} keys has two diagonals",
                    shape.q_len, shape.kv_len
                );
                Err(Failure::needs("--align", had, "top-left or bottom-right"))
            }
        }
    }
}

/// What `--window` may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    left: Option<usize>,
    right: Option<usize>,
}

impl Window {
    /// Keys before and after the diagonal, −1 for no bound.
    pub(crate) fn sides(self) -> [i64; 2] {
        [self.left, self.right].map(|side| side.map_or(-1, |keys| keys as i64))
    }
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let side = |text: &str| match text.trim() {
            "-1" => Ok(None),
            number => number
                .parse()
                .map(Some)
                .map_err(|_| format!("`{number}` is not a number of keys, nor -1 for no bound")),
        };
        let (left, right) = text.split_once(',').ok_or("two numbers are needed: LEFT,RIGHT")?;
        Ok(Self { left: side(left)?, right: side(right)? })
    }
}

/// What `--device` may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The first GPU if it can run the call, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// This GPU and no other.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| "it must be auto, cpu or cuda:N".to_owned()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The form kernels are loaded in, if the environment insists on one: for tests of both.
pub(crate) fn form() -> Result<Option<Form>> {
    const SETTING: &str = "FERROFLASH_ARTIFACT";
    match std::env::var_os(SETTING) {
        None => Ok(None),
        Some(form) if form == "cubin" => Ok(Some(Form::Cubin)),
        Some(form) if form == "ptx" => Ok(Some(Form::Ptx)),
        Some(other) => Err(Failure::needs(SETTING, other.display(), "cubin or ptx")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_two_numbers() {
        let window = |left, right| Ok(Window { left, right });
        assert_eq!("128,0".parse(), window(Some(128), Some(0)));
        assert_eq!("-1, 7".parse(), window(None, Some(7)));
        assert!("3".parse::<Window>().is_err());
        assert!("-2,0".parse::<Window>().is_err_and(|why| why.contains("-2")));
    }

    #[test]
    fn devices_are_named() {
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        assert!("cuda".parse::<DeviceChoice>().is_err());
        assert!("gpu".parse::<DeviceChoice>().is_err());
    }
}
