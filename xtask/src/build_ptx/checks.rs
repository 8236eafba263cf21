//! What a kernel's text and its assembly must satisfy before it may ship.

use anyhow::{Result, bail};
use ferroflash_core::table::{KERNELS, KernelSpec};
use serde::{Deserialize, Serialize};

use super::assemble::Resources;
use super::manifest::Kernel;
use super::ptx_text::Entry;

/// Most kernels there may be.
const MOST_KERNELS: usize = 256;
/// Most bytes that all compressed artifacts may take.
const MOST_BYTES: usize = 8_000_000;

/// Instructions of a body that are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Instructions {
    /// `mma.sync` or `wgmma.mma_async`.
    pub(crate) matrix: u32,
    /// `bar.sync`, `barrier.sync` and their kin.
    pub(crate) barrier: u32,
    /// `mbarrier.*`.
    pub(crate) mbarrier: u32,
    /// `cp.async*`, without the waits and commits.
    pub(crate) async_copy: u32,
    /// All.
    pub(crate) total: u32,
}

/// Counts a body's instructions; refuses calls, traps and local memory.
pub(crate) fn body(entry: &Entry) -> Result<Instructions> {
    let mut counts = Instructions::default();
    for opcode in entry.opcodes() {
        let (stem, rest) = opcode.split_once('.').unwrap_or((opcode, ""));
        match stem {
            "call" => bail!("a call is left in the body: everything must be inlined"),
            "trap" | "brkpt" => {
                bail!("a `{stem}` is left in the body: a panic, such as an index check, can happen")
            }
            "bar" | "barrier" => counts.barrier += 1,
            "mbarrier" => counts.mbarrier += 1,
            "mma" => counts.matrix += 1,
            "wgmma" if rest.starts_with("mma_async") => counts.matrix += 1,
            "cp" if rest.starts_with("async") => {
                let bookkeeping = rest.contains("wait") || rest.contains("commit");
                counts.async_copy += u32::from(!bookkeeping);
            }
            _ => {}
        }
        counts.total += 1;
    }
    if let Some(label) = endless_loop(&entry.body) {
        bail!("{label} branches to itself: a panic, such as an index check, can happen");
    }
    let mut words = entry.body.split(|c: char| c.is_whitespace() || matches!(c, '[' | ']' | ';'));
    if let Some(word) = words.find(|word| is_local_memory(word)) {
        bail!("`{word}`: an array lies in local memory; unroll the loops that index it");
    }
    Ok(counts)
}

/// The label of a loop with nothing in it, which is what a panic handler's `loop {}` becomes.
fn endless_loop(body: &str) -> Option<&str> {
    let lines: Vec<&str> = body.lines().collect();
    let itself = |pair: &&[&str]| {
        let label = pair[0].strip_suffix(':');
        let target = pair[1].strip_suffix(';').and_then(|line| line.split_once(' '));
        label.is_some()
            && target.is_some_and(|(opcode, to)| opcode.starts_with("bra") && Some(to) == label)
    };
    lines.windows(2).find(itself).map(|pair| pair[0])
}

fn is_local_memory(word: &str) -> bool {
    word.starts_with("__local_depot")
        || word == ".local"
        || ((word.starts_with("ld.") || word.starts_with("st.")) && word.contains(".local"))
}

/// The counts the table asks for.
pub(crate) fn counts(spec: &KernelSpec, found: &Instructions) -> Result<()> {
    let needed = spec.matrix_instructions();
    if found.matrix != needed {
        bail!(
            "{} matrix instructions where the table says {needed}: a loop was duplicated, or \
             dropped, by the compiler, or `KernelSpec::matrix_instructions` is out of date",
            found.matrix
        );
    }
    let needed = spec.barriers();
    if found.barrier != needed {
        bail!(
            "{} barriers where the table says {needed}: one was duplicated, or dropped, by the \
             compiler, or `KernelSpec::barriers` is out of date",
            found.barrier
        );
    }
    Ok(())
}

/// The patches stand in the text, each once.
pub(crate) fn patches(spec: &KernelSpec, alignment: Option<u32>, ptx: &str) -> Result<()> {
    let mut needed = vec![format!(".maxntid {}, 1, 1\n", spec.threads)];
    if spec.blocks_per_sm > 0 {
        needed.push(format!(".minnctapersm {}\n", spec.blocks_per_sm));
    }
    if let Some(bytes) = alignment {
        needed.push(format!(".param .align {bytes} .b8 {}_param_0[", spec.name));
    }
    for patch in needed {
        let times = ptx.matches(&patch).count();
        if times != 1 {
            bail!("`{}` stands in its PTX {times} times, not once", patch.trim());
        }
    }
    Ok(())
}

/// No spills, no stack, no static shared memory.
pub(crate) fn resources(found: &Resources) -> Result<()> {
    if found.spill_bytes != 0 {
        bail!("{} bytes of registers spill for {}", found.spill_bytes, found.target);
    }
    if found.stack_bytes != 0 {
        bail!("a stack frame of {} bytes for {}", found.stack_bytes, found.target);
    }
    if found.static_shared_bytes != 0 {
        bail!(
            "{} bytes of static shared memory for {}: the plan has dynamic memory only",
            found.static_shared_bytes,
            found.target
        );
    }
    Ok(())
}

/// Every row of the table has its one entry, and every entry its row.
pub(crate) fn same_names<'a>(
    what: &str,
    table: impl Iterator<Item = &'a str>,
    found: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let (mut table, mut found): (Vec<&str>, Vec<&str>) = (table.collect(), found.collect());
    table.sort_unstable();
    found.sort_unstable();
    if let Some(pair) = found.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("{what} has {} twice", pair[0]);
    }
    let missing: Vec<&str> = table.iter().copied().filter(|n| !found.contains(n)).collect();
    let unknown: Vec<&str> = found.iter().copied().filter(|n| !table.contains(n)).collect();
    if !missing.is_empty() {
        bail!("{what} lacks kernels of the table: {}", missing.join(", "));
    }
    if !unknown.is_empty() {
        bail!("{what} has kernels that are not in the table: {}", unknown.join(", "));
    }
    Ok(())
}

/// The limits on all artifacts together.
pub(crate) fn limits(kernels: &[Kernel]) -> Result<()> {
    if KERNELS.len() > MOST_KERNELS {
        bail!("the table has {} kernels; at most {MOST_KERNELS} may ship", KERNELS.len());
    }
    let bytes: usize = kernels.iter().map(|k| k.ptx_compressed + k.cubin_compressed).sum();
    if bytes > MOST_BYTES {
        bail!("the artifacts take {bytes} bytes; at most {MOST_BYTES} may ship");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::ptx_text::Module;
    use super::*;

    fn entry(body: &str) -> Entry {
        let text = format!(".version 7.0\n.target sm_80\n.visible .entry k()\n{{\n{body}\n}}\n");
        Module::parse(&text).expect("the module is well formed").entries.remove(0)
    }

    #[test]
    fn instructions_are_counted() {
        let counts = body(&entry(
            "mma.sync.aligned.m16n8k16 {%r1}, {%r2};\n@%p1 bar.sync 0;\nbarrier.sync 1, 64;\n\
             cp.async.cg.shared.global [%r1], [%rd1], 16;\ncp.async.commit_group;\n\
             cp.async.wait_group 0;\nwgmma.mma_async.sync {%f1}, %rd1;\nwgmma.fence.sync;\n\
             mbarrier.init.shared.b64 [%r1], 1;\nret;",
        ));
        let counts = counts.expect("nothing is refused");
        let expected =
            Instructions { matrix: 2, barrier: 2, mbarrier: 1, async_copy: 1, total: 10 };
        assert_eq!(counts, expected);
    }

    #[test]
    fn calls_traps_and_local_memory_are_refused() {
        for refused in [
            "call.uni (r), helper, (p);",
            "call helper;",
            "@%p1 trap;",
            "$L2:\nbra.uni $L2;",
            ".local .align 16 .b8 __local_depot0[64];",
            "ld.local.b32 %r1, [%rd1];",
            "st.local.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};",
        ] {
            assert!(body(&entry(refused)).is_err(), "{refused}");
        }
        let fine = "$L2:\n@%p1 bra $L2;\nmbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], %r2;\n\
                    fence.mbarrier_init.release.cluster;\nst.global.b32 [%rd1], %r1;";
        assert!(body(&entry(fine)).is_ok());
    }

    #[test]
    fn table_and_entries_must_agree() {
        let agree = |found: &[&str]| {
            same_names("the module", ["a", "b"].into_iter(), found.iter().copied())
        };
        assert!(agree(&["b", "a"]).is_ok());
        for (found, said) in [
            (&["a"][..], "lacks"),
            (&["a", "b", "c"][..], "not in"),
            (&["a", "a", "b"][..], "twice"),
        ] {
            assert!(agree(found).expect_err("they differ").to_string().contains(said));
        }
    }
}
