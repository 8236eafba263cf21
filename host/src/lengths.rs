//! Lengths and offsets of items that lie in host memory: checked before anything reads them,
//! whichever device runs the call.

use std::fmt::Display;
use std::ops::Range;

use crate::attention::{Attention, Layout, Lengths, Packed, Shape};
use crate::error::{Error, Result};

/// The host integers of `lengths`, of which there must be `count`.
///
/// # Errors
/// [`Error::Argument`] for lengths in device memory, which a host cannot read, or another number
/// of them.
pub(crate) fn on_host<'a>(
    lengths: &Lengths<'a>,
    argument: &'static str,
    count: usize,
) -> Result<&'a [i32]> {
    match lengths {
        Lengths::Device(_) => Err(Error::argument(
            argument,
            "lengths in device memory",
            "lengths in host memory (Lengths::Host) where the CPU runs the call",
        )),
        Lengths::Host(values) if values.len() != count => {
            Err(Error::argument(argument, format!("{} values", values.len()), format!("{count}")))
        }
        Lengths::Host(values) => Ok(values),
    }
}

/// Lengths of items, each within `0..=limit`.
///
/// # Errors
/// [`Error::Argument`] naming the first length outside that range.
pub(crate) fn within(argument: &'static str, lengths: &[i32], limit: usize) -> Result<Vec<usize>> {
    let within = |(item, &length): (usize, &i32)| match usize::try_from(length) {
        Ok(length) if length <= limit => Ok(length),
        _ => Err(wrong(argument, item, length, format!("between 0 and {limit}"))),
    };
    lengths.iter().enumerate().map(within).collect()
}

/// The rows of each item from cumulative offsets: `[0, …, tokens]`, never decreasing.
///
/// # Errors
/// [`Error::Argument`] naming the first offset that breaks this.
pub(crate) fn spans(
    argument: &'static str,
    cumulative: &[i32],
    tokens: usize,
) -> Result<Vec<Range<usize>>> {
    match (cumulative.first(), cumulative.last()) {
        (Some(0), Some(&last)) if last as i64 == tokens as i64 => {}
        (Some(0), Some(&last)) => {
            return Err(wrong(argument, cumulative.len() - 1, last, format!("the {tokens} rows")));
        }
        (Some(&first), _) => return Err(wrong(argument, 0, first, "0")),
        (None, _) => return Err(Error::argument(argument, "no values", "at least one")),
    }
    let span = |(item, pair): (usize, &[i32])| {
        if pair[1] < pair[0] {
            return Err(wrong(argument, item + 1, pair[1], format!("at least {}", pair[0])));
        }
        Ok(pair[0] as usize..pair[1] as usize)
    };
    cumulative.windows(2).enumerate().map(span).collect()
}

/// Shortens each span to the rows used of it, then checks it against the stated maximum.
///
/// # Errors
/// [`Error::Argument`] for a used length outside its span, or an item longer than `maximum`, which
/// is the shape's `maximum_name`.
pub(crate) fn shorten(
    spans: &mut [Range<usize>],
    used: Option<(&'static str, &[i32])>,
    maximum: usize,
    maximum_name: &'static str,
) -> Result<()> {
    if let Some((argument, used)) = used {
        for (item, (span, &length)) in spans.iter_mut().zip(used).enumerate() {
            match usize::try_from(length) {
                Ok(rows) if rows <= span.len() => span.end = span.start + rows,
                _ => {
                    let needs = format!("between 0 and the item's {} rows", span.len());
                    return Err(wrong(argument, item, length, needs));
                }
            }
        }
    }
    match spans.iter().map(|span| span.len()).max() {
        Some(longest) if longest > maximum => Err(Error::argument(
            maximum_name,
            format!("stated as at most {maximum} rows an item"),
            format!("at least {longest}, the longest item"),
        )),
        _ => Ok(()),
    }
}

type Spans = Vec<Range<usize>>;

/// The used rows of each packed item, in q and in k and v.
///
/// # Errors
/// [`Error::Argument`] for lengths in device memory, and for what [`spans`] and [`shorten`] find.
pub(crate) fn packed_spans(
    shape: &Shape,
    packed: &Packed<'_>,
    q_tokens: usize,
    kv_tokens: usize,
) -> Result<(Spans, Spans)> {
    let side = |side: Side<'_, '_>| {
        let cumulative = on_host(side.cumulative, side.name, shape.batch + 1)?;
        let used = match side.used {
            Some(used) => Some((side.used_name, on_host(used, side.used_name, shape.batch)?)),
            None => None,
        };
        let mut spans = spans(side.name, cumulative, side.tokens)?;
        shorten(&mut spans, used, side.maximum, side.maximum_name)?;
        Ok(spans)
    };
    let [q, kv] = sides(shape, packed, q_tokens, kv_tokens);
    Ok((side(q)?, side(kv)?))
}

/// Checks the lengths of a call that lie in host memory, each as far as the host can know: a used
/// length whose offsets lie on a device is held to the stated maximum.
///
/// # Errors
/// As [`packed_spans`] and [`within`].
pub(crate) fn check_on_host(
    attention: &Attention,
    key_lengths: Option<&Lengths<'_>>,
    packed: Option<&Packed<'_>>,
) -> Result<()> {
    let shape = &attention.shape;
    if let Some(lengths @ Lengths::Host(_)) = key_lengths {
        within("key_lengths", on_host(lengths, "key_lengths", shape.batch)?, shape.kv_len)?;
    }
    let (Some(packed), Layout::Packed { q_tokens, kv_tokens }) = (packed, attention.layout) else {
        return Ok(());
    };
    for side in sides(shape, packed, q_tokens, kv_tokens) {
        let used = match side.used {
            Some(used @ Lengths::Host(_)) => {
                Some((side.used_name, on_host(used, side.used_name, shape.batch)?))
            }
            _ => None,
        };
        match (side.cumulative, used) {
            (Lengths::Host(_), used) => {
                let cumulative = on_host(side.cumulative, side.name, shape.batch + 1)?;
                let mut spans = spans(side.name, cumulative, side.tokens)?;
                shorten(&mut spans, used, side.maximum, side.maximum_name)?;
            }
            (Lengths::Device(_), Some((name, used))) => {
                within(name, used, side.maximum)?;
            }
            (Lengths::Device(_), None) => {}
        }
    }
    Ok(())
}

/// The lengths of one side of packed items, queries or keys, and what they are called.
struct Side<'p, 'a> {
    cumulative: &'p Lengths<'a>,
    name: &'static str,
    used: Option<&'p Lengths<'a>>,
    used_name: &'static str,
    tokens: usize,
    maximum: usize,
    maximum_name: &'static str,
}

fn sides<'p, 'a>(
    shape: &Shape,
    packed: &'p Packed<'a>,
    q_tokens: usize,
    kv_tokens: usize,
) -> [Side<'p, 'a>; 2] {
    [
        Side {
            cumulative: &packed.cu_q,
            name: "cu_q",
            used: packed.used_q.as_ref(),
            used_name: "used_q",
            tokens: q_tokens,
            maximum: shape.q_len,
            maximum_name: "q_len",
        },
        Side {
            cumulative: &packed.cu_k,
            name: "cu_k",
            used: packed.used_k.as_ref(),
            used_name: "used_k",
            tokens: kv_tokens,
            maximum: shape.kv_len,
            maximum_name: "kv_len",
        },
    ]
}

fn wrong(argument: &'static str, index: usize, had: i32, needs: impl Display) -> Error {
    Error::argument(argument, format!("value {index} is {had}"), needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argument_of<T>(result: Result<T>) -> Option<&'static str> {
        match result {
            Err(Error::Argument { argument, .. }) => Some(argument),
            _ => None,
        }
    }

    #[test]
    fn m10_offsets_start_at_zero_never_fall_and_end_at_the_rows() {
        assert_eq!(spans("cu_q", &[0, 2, 2, 5], 5).ok(), Some(vec![0..2, 2..2, 2..5]));
        assert_eq!(spans("cu_q", &[0], 0).ok(), Some(vec![]));
        for broken in [&[1, 5][..], &[0, 3, 2, 5], &[0, 4], &[0, 6], &[0, -1], &[]] {
            assert_eq!(argument_of(spans("cu_q", broken, 5)), Some("cu_q"), "{broken:?}");
        }
    }

    #[test]
    fn m10_used_lengths_and_maxima_are_checked() {
        let items = || vec![0..3, 3..7];
        let mut spans = items();
        assert!(shorten(&mut spans, Some(("used_q", &[2, 0])), 2, "q_len").is_ok());
        assert_eq!(spans, [0..2, 3..3]);
        for used in [[4, 0], [0, -1]] {
            let refused = shorten(&mut items(), Some(("used_q", &used)), 9, "q_len");
            assert_eq!(argument_of(refused), Some("used_q"));
        }
        assert_eq!(argument_of(shorten(&mut items(), None, 3, "q_len")), Some("q_len"));
    }

    #[test]
    fn p8_key_lengths_stay_within_the_keys() {
        assert_eq!(within("key_lengths", &[0, 8], 8).ok(), Some(vec![0, 8]));
        assert_eq!(argument_of(within("key_lengths", &[0, 9], 8)), Some("key_lengths"));
        assert_eq!(argument_of(within("key_lengths", &[-1], 8)), Some("key_lengths"));
        assert_eq!(
            argument_of(on_host(&Lengths::Host(&[1]), "key_lengths", 2)),
            Some("key_lengths")
        );
    }
}
