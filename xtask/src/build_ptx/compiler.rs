//! A rustc that can build `core` for `nvptx64-nvidia-cuda`, and the build of one unit with it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use ferroflash_core::axes::Family;

use super::manifest::hex_hash;
use crate::workspace::{capture, cargo, on_path, printed, read_text, root, target};

/// Environment variable that names the compiler to use.
const SETTING: &str = "FERROFLASH_PTX_RUSTC";
/// Oldest compiler the kernels are written for.
const OLDEST: (u32, u32) = (1, 95);
const WHAT_TO_INSTALL: &str = "\
no Rust compiler here can build PTX: it takes rustc 1.95 or later and core's source. Any of
  rustup toolchain install nightly --component rust-src
  apt-get install rustc-web rust-web-src            (Debian)
  FERROFLASH_PTX_RUSTC=/path/to/rustc               (one whose sysroot holds lib/rustlib/src)
will do. Only changing kernels takes this: the compiled ones are in host/artifacts.";

/// A compiler that was found.
pub(crate) struct Compiler {
    rustc: PathBuf,
    cargo: Option<PathBuf>,
    /// All that `rustc -vV` says.
    pub(crate) version: String,
    /// Where it was found, in words.
    pub(crate) origin: String,
}

impl Compiler {
    /// Takes the setting, else a rustup nightly with `rust-src`, else Debian's compiler.
    pub(crate) fn find() -> Result<Self> {
        if let Some(setting) = std::env::var_os(SETTING) {
            return Self::at(Path::new(&setting), SETTING)
                .with_context(|| format!("{SETTING} is {}", setting.display()));
        }
        let mut rejected = Vec::new();
        let debian = Path::new("/usr/bin/rustc");
        let debian = debian.is_file().then(|| (debian.to_path_buf(), "the system's rustc".into()));
        for (rustc, origin) in rustup_nightlies().into_iter().chain(debian) {
            match Self::at(&rustc, &origin) {
                Ok(compiler) => return Ok(compiler),
                Err(why) => rejected.push(format!("\n  not {origin}: {why:#}")),
            }
        }
        Err(anyhow!("{WHAT_TO_INSTALL}{}", rejected.concat()))
    }

    fn at(rustc: &Path, origin: &str) -> Result<Self> {
        let version = printed(Command::new(rustc).arg("-vV"))?;
        let release = field(&version, "release").context("`rustc -vV` names no release")?;
        let mut numbers = release.split('.').map_while(|part| part.parse::<u32>().ok());
        let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if found < OLDEST {
            bail!("it is {release}, and the kernels need {}.{} or later", OLDEST.0, OLDEST.1);
        }
        let sysroot = PathBuf::from(printed(Command::new(rustc).args(["--print", "sysroot"]))?);
        if !sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml").is_file() {
            bail!("its sysroot has no source of core (lib/rustlib/src/rust/library)");
        }
        // A nightly's own cargo knows that nightly's way of building core.
        let cargo = sysroot.join("bin/cargo");
        let nightly = release.contains("nightly");
        let cargo = (nightly && cargo.is_file()).then_some(cargo);
        Ok(Self { rustc: rustc.to_path_buf(), cargo, version, origin: origin.to_owned() })
    }

    /// LLVM's version.
    pub(crate) fn llvm(&self) -> &str {
        field(&self.version, "LLVM version").unwrap_or("unknown")
    }

    /// Compiles every kernel of one unit of a family and returns the module's PTX.
    pub(crate) fn compile(&self, family: Family, unit: &str) -> Result<String> {
        let flags = rustflags(family)?;
        let remap = format!("--remap-path-prefix={}=.", root().display());
        // Another compiler or other flags must not find this one's outputs fresh: the `.s` has the
        // same name whoever wrote it.
        let key = hex_hash(format!("{}\0{}", self.version, flags.join("\0")).as_bytes());
        let folder = target().join("ptx-build").join(format!("{unit}-{}", &key[..8]));

        let mut command = match &self.cargo {
            Some(program) => {
                let mut command = Command::new(program);
                command.current_dir(root());
                command
            }
            None => cargo(),
        };
        command
            .args(["rustc", "--quiet", "--package", "ferroflash-kernels", "--lib"])
            .args(["--profile", "ptx", "--target", "nvptx64-nvidia-cuda", "-Zbuild-std=core"])
            .args(["--no-default-features", "--features", unit])
            .args(["--crate-type", "cdylib", "--target-dir"])
            .arg(&folder)
            .args(["--", "--emit=asm"]);
        for inherited in [
            "RUSTFLAGS",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "CARGO_BUILD_RUSTFLAGS",
            "CARGO_BUILD_TARGET",
            "CARGO_INCREMENTAL",
            "LD_LIBRARY_PATH",
        ] {
            command.env_remove(inherited);
        }
        let all_flags = [flags.join("\x1f"), remap].join("\x1f");
        command
            .env("RUSTC", &self.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", all_flags);

        let output = capture(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let said = without_known_warning(&said);
        if !said.is_empty() {
            eprintln!("{said}");
        }
        if !output.status.success() {
            bail!("{} did not compile the unit {unit}", self.origin);
        }
        let text = folder.join("nvptx64-nvidia-cuda/ptx/deps/ferroflash_kernels.s");
        read_text(&text).context("rustc wrote no PTX; remove the folder to build it anew")
    }
}

/// Compiler flags of a family: they are part of the artifact's identity, and hold no path.
pub(crate) fn rustflags(family: Family) -> Result<Vec<String>> {
    let target = family.ptx_target();
    // The lowest PTX version that has the family's instructions: a driver's compiler accepts none
    // newer than itself. 7.0 is CUDA 11.0; 8.1 (vector `red`) is CUDA 12.1.
    let ptx = match target {
        "sm_80" => "+ptx70",
        "sm_90a" => "+ptx81",
        other => bail!("no PTX version is chosen for {other}: say which in `rustflags`"),
    };
    let flags = [
        "-C",
        &format!("target-cpu={target}"),
        "-C",
        &format!("target-feature={ptx}"),
        // The PTX is taken from LLVM's output; nothing is linked.
        "-C",
        "linker=true",
        // Fragments are arrays in registers only if every loop over them is unrolled.
        "-C",
        "llvm-args=-unroll-threshold=100000",
        // It may duplicate a barrier.
        "-Zmir-enable-passes=-JumpThreading",
        "-Zlocation-detail=none",
    ];
    Ok(flags.map(str::to_owned).to_vec())
}

/// rustc says of every crate that PTX versions are not a stable feature.
fn without_known_warning(said: &str) -> String {
    let blocks = said.split("\n\n");
    let kept = blocks.filter(|block| {
        let block = block.trim();
        !block.is_empty() && !block.starts_with("warning: unstable feature specified for")
    });
    kept.map(str::trim_end).collect::<Vec<_>>().join("\n\n")
}

fn rustup_nightlies() -> Vec<(PathBuf, String)> {
    if on_path("rustup").is_none() {
        return Vec::new();
    }
    let listed = printed(Command::new("rustup").args(["toolchain", "list"])).unwrap_or_default();
    let names = listed.lines().filter_map(|line| line.split_whitespace().next());
    let nightlies = names.filter(|name| name.starts_with("nightly"));
    let located = nightlies.filter_map(|name| {
        let rustc = printed(Command::new("rustup").args(["which", "--toolchain", name, "rustc"]));
        Some((PathBuf::from(rustc.ok()?), format!("rustup's {name}")))
    });
    located.collect()
}

fn field<'a>(version: &'a str, name: &str) -> Option<&'a str> {
    let line = version.lines().find(|line| line.starts_with(name))?;
    line[name.len()..].strip_prefix(':').map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_version_are_found() {
        let version = "rustc 1.96.0 (abc)\nbinary: rustc\nrelease: 1.96.0\nLLVM version: 22.1.8";
        assert_eq!(field(version, "release"), Some("1.96.0"));
        assert_eq!(field(version, "LLVM version"), Some("22.1.8"));
        assert_eq!(field(version, "host"), None);
    }

    #[test]
    fn only_the_known_warning_is_dropped() {
        let known = "warning: unstable feature specified for `-Ctarget-feature`: `ptx70`\n  |\n";
        assert_eq!(without_known_warning(known), "");
        let both = format!("{known}\nwarning: unused variable: `x`\n --> a.rs:1:2\n\n");
        assert_eq!(without_known_warning(&both), "warning: unused variable: `x`\n --> a.rs:1:2");
    }
}
