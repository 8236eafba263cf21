use super::case::{Case, shape};
use super::{assert_close, assert_zero};
use crate::attention::{Align, Attention, Dropout, Mask};

/// Square, one head, d = S, with V = dO = I: then o is the dropped P, and dV its transpose.
fn identity(dropout: Dropout) -> Case {
    let size = 40;
    let attention = Attention::new(shape(1, (1, 1), (size, size), (size, size))).dropout(dropout);
    let mut case = Case::new(attention);
    let identity = |index: usize| f32::from(index / size == index % size);
    case.v = (0..size * size).map(identity).collect();
    case.d_o = case.v.clone();
    case
}

#[test]
fn d4_identity_values_show_the_mask() {
    let dropout = Dropout::new(0.25, (17, 3));
    let case = identity(dropout);
    let undropped = identity(Dropout { probability: 0.0, ..dropout });
    let (dropped_p, p) = (case.forward(), undropped.forward());
    assert_eq!(dropped_p.lse, p.lse, "dropout leaves lse alone");
    let dv = case.backward().dv;
    let size = case.attention.shape.q_len;
    let mask = ferroflash_core::dropout::DropoutMask::new(0.25, 17, 3);
    for row in 0..size {
        for key in 0..size {
            let expected = if mask.keeps(0, row as u32, key as u32) {
                p.o[row * size + key] / 0.75
            } else {
                0.0
            };
            assert_close(&[dropped_p.o[row * size + key]], &[expected], 1e-14, "o");
            assert_close(&[dv[key * size + row]], &[expected], 1e-14, "dv");
        }
    }
    let again = identity(dropout).forward();
    assert_eq!(again, dropped_p, "same seed and offset");
    assert_ne!(identity(Dropout { state: (17, 4).into(), ..dropout }).forward(), dropped_p);
}

#[test]
fn d4_everything_dropped_is_zero() {
    let case = identity(Dropout::new(1.0, (1, 0)));
    assert_zero(&case.forward().o, "o");
    let gradients = case.backward();
    assert_zero(&gradients.dq, "dq");
    assert_zero(&gradients.dk, "dk");
    assert_zero(&gradients.dv, "dv");
}

/// A packed item has the mask of the same item in a batch: positions are its own.
#[test]
fn packed_items_count_their_own_rows_and_keys() {
    let dropout = Dropout::new(0.5, (5, 6));
    let mask = Mask::causal(Align::BottomRight);
    let mut packed = Case::packed((2, 1), (4, 3), &[0, 20, 40], &[0, 36, 72], mask);
    let mut batched =
        Case::new(Attention::new(shape(2, (2, 1), (20, 36), (4, 3))).mask(mask).dropout(dropout));
    packed.attention = packed.attention.dropout(dropout);
    (batched.q, batched.k) = (packed.q.clone(), packed.k.clone());
    (batched.v, batched.d_o) = (packed.v.clone(), packed.d_o.clone());
    assert_eq!(packed.forward().o, batched.forward().o);
    assert_eq!(packed.backward(), batched.backward());
}
