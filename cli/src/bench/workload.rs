//! Workloads in words, and the operations that their rates count.
//!
//! The papers' convention: 2·(D + Dv) operations a score forward, 2·(3·D + 2·Dv) backward, which
//! for D = Dv is 4·D and 2.5 times that; Sq·Sk scores a head, half as many where a causal mask is
//! square. Under any other mask the scores are those that it leaves visible.

use ferroflash::{Attention, Dtype, Shape};

use super::record::{Features, Pass, Workload};
use crate::options::{Alignment, Causal, MaskOptions, Window};

impl Workload {
    /// A pass under a mask, without other options.
    pub(crate) fn new(direction: Pass, shape: &Shape, dtype: Dtype, mask: &MaskOptions) -> Self {
        let align = match mask.causal {
            Causal::TopLeft => Some(Alignment::TopLeft),
            Causal::BottomRight => Some(Alignment::BottomRight),
            Causal::None => mask.align,
        };
        // Where rows and keys are as many, both alignments are one.
        let align = align.filter(|_| shape.q_len != shape.kv_len);
        Self {
            direction,
            d: shape.head_dim,
            dv: shape.value_dim,
            s: shape.q_len,
            sk: shape.kv_len,
            b: shape.batch,
            heads: shape.q_heads,
            kv_heads: shape.kv_heads,
            dtype: dtype.to_string(),
            causal: mask.causal != Causal::None,
            deterministic: false,
            options: Features {
                window: mask.window.map(Window::sides),
                align: align.map(|align| align.name().to_owned()),
                ..Features::default()
            },
        }
    }

    /// Sizes of the call.
    pub(super) fn shape(&self) -> Shape {
        Shape {
            batch: self.b,
            q_heads: self.heads,
            kv_heads: self.kv_heads,
            q_len: self.s,
            kv_len: self.sk,
            head_dim: self.d,
            value_dim: self.dv,
        }
    }

    /// Operations of one call, `attention` being its description.
    pub(super) fn flops(&self, attention: &Attention) -> f64 {
        let (d, dv) = (self.d as f64, self.dv as f64);
        let per_score = match self.direction {
            Pass::Forward => 2.0 * (d + dv),
            Pass::Backward => 2.0 * (3.0 * d + 2.0 * dv),
        };
        let all = self.s as f64 * self.sk as f64;
        let scores = match (self.causal, self.options.window) {
            (false, None) => all,
            (true, None) if self.s == self.sk => all / 2.0,
            _ => attention.visibility().visible_cells() as f64,
        };
        per_score * scores * self.b as f64 * self.heads as f64
    }

    /// The pass and its mask: `backward, causal, deterministic`.
    pub(super) fn kind(&self) -> String {
        let mut words = match self.direction {
            Pass::Forward => "forward".to_owned(),
            Pass::Backward => "backward".to_owned(),
        };
        words += if self.causal { ", causal" } else { ", full" };
        if self.deterministic {
            words += ", deterministic";
        }
        let Features { window, align, scale, softcap, dropout, alibi } = &self.options;
        if let Some([left, right]) = window {
            words += &format!(", window {left},{right}");
        }
        for (name, value) in [("scale", scale), ("softcap", softcap), ("dropout", dropout)] {
            if let Some(value) = value {
                words += &format!(", {name} {value}");
            }
        }
        if *alibi {
            words += ", alibi";
        }
        if let Some(align) = align {
            words += &format!(", {align}");
        }
        words
    }

    /// Heads: `32`, or `64/8` where they share keys.
    pub(super) fn heads(&self) -> String {
        pair(self.heads, self.kv_heads)
    }

    /// Lengths: `4096`, or `1/4096` where rows and keys differ in number.
    pub(super) fn lengths(&self) -> String {
        pair(self.s, self.sk)
    }

    /// Channels: `128`, or `192/128` where values have others.
    pub(super) fn channels(&self) -> String {
        pair(self.d, self.dv)
    }

    /// All of it on one line.
    pub(crate) fn words(&self) -> String {
        format!(
            "{} {}, d {}, s {}, b {}, heads {}",
            self.dtype,
            self.kind(),
            self.channels(),
            self.lengths(),
            self.b,
            self.heads()
        )
    }
}

fn pair(one: usize, other: usize) -> String {
    if one == other { one.to_string() } else { format!("{one}/{other}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::run;
    use ferroflash::{Align, Mask};

    #[test]
    fn operations_follow_the_convention() {
        let mut workload = run(&[1.0; 20]).rows[0].workload.clone();
        let full = Attention::new(workload.shape());
        let square = 4.0 * 2.0 * 4.0 * 128.0 * 128.0 * 64.0;
        assert_eq!(workload.flops(&full), square);
        workload.direction = Pass::Backward;
        assert_eq!(workload.flops(&full), 2.5 * square);
        workload.causal = true;
        let causal = full.mask(Mask::causal(Align::BottomRight));
        assert_eq!(workload.flops(&causal), 1.25 * square);
    }

    #[test]
    fn other_masks_count_what_is_visible() {
        let mut workload = run(&[1.0; 20]).rows[0].workload.clone();
        workload.sk = 256;
        workload.causal = true;
        let mask = Mask::causal(Align::BottomRight);
        let causal = Attention::new(workload.shape()).mask(mask);
        let cells = 128.0 * 128.0 + 128.0 * 129.0 / 2.0;
        assert_eq!(workload.flops(&causal), 4.0 * 64.0 * 8.0 * cells);
        workload.options.window = Some([0, 0]);
        let window = Attention::new(workload.shape()).mask(mask.window(Some(0), Some(0)));
        assert_eq!(workload.flops(&window), 4.0 * 64.0 * 8.0 * 128.0);
    }

    #[test]
    fn words_name_what_differs() {
        let mut workload = run(&[1.0; 20]).rows[0].workload.clone();
        assert_eq!(workload.words(), "f32 forward, full, d 64, s 128, b 2, heads 4");
        workload.kv_heads = 2;
        workload.options.window = Some([-1, 3]);
        workload.options.softcap = Some(30.0);
        workload.options.alibi = true;
        let words =
            "f32 forward, full, window -1,3, softcap 30, alibi, d 64, s 128, b 2, heads 4/2";
        assert_eq!(workload.words(), words);
    }
}
