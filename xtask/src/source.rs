//! Where the sources of llama.cpp come from.

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::paths;
use crate::run::{Job, Ui};
use crate::toolchain::Venv;

/// The source archive on PyPI whose `vendor/llama.cpp` is a full tree, with tools and tests (ggml 0.25.3).
const SDIST: &str = "llama-cpp-python";
const SDIST_VERSION: &str = "0.3.36";
const SDIST_SHA256: &str = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e";

/// The crate that carries the next version's tree (ggml 0.26, without tools and tests).
const CRATE: &str = "llama-cpp-sys-2";
const CRATE_VERSION: &str = "0.1.161";
const CRATE_SHA256: &str = "e9bea77fde41bbc15a278891cd5edd2ba07c5260d162614b41080ba1f100b39b";

/// A tree of llama.cpp.
pub struct Source {
    /// Its root.
    pub dir: PathBuf,
    /// What tells it from others: a change of this means building anew.
    pub identity: String,
    /// Whether it is the user's own checkout, which may be edited at any time.
    pub own: bool,
}

/// The tree to build: `LLAMA_CPP_DIR`, or the pinned one, brought where it is missing.
///
/// # Errors
/// When the download fails or is not what was pinned, or `LLAMA_CPP_DIR` holds no llama.cpp.
pub fn pinned_or_own(ui: &Ui) -> Result<Source> {
    match paths::given("LLAMA_CPP_DIR") {
        Some(dir) => {
            let dir = fs::canonicalize(&dir).with_context(|| format!("LLAMA_CPP_DIR={}", Path::new(&dir).display()))?;
            ensure!(
                dir.join("ggml/include/ggml-backend.h").exists(),
                "LLAMA_CPP_DIR={} holds no llama.cpp (no ggml/include/ggml-backend.h)",
                dir.display()
            );
            Ok(Source { identity: dir.display().to_string(), dir, own: true })
        }
        None => sdist(ui),
    }
}

fn sdist(ui: &Ui) -> Result<Source> {
    let dir = paths::target().join("llama-src");
    let stem = format!("llama_cpp_python-{SDIST_VERSION}");
    let source = Source { dir: dir.join(&stem).join("vendor/llama.cpp"), identity: stem.clone(), own: false };
    if source.dir.exists() {
        return Ok(source);
    }
    let venv = Venv::ensure(ui)?;
    let archive = paths::target().join("downloads").join(format!("{stem}.tar.gz"));
    if !archive.exists() || sha256(&archive)? != SDIST_SHA256 {
        let mut command = venv.pip("download");
        command.args(["--no-deps", "--no-binary", SDIST, "--dest"]).arg(paths::target().join("downloads"));
        command.arg(format!("{SDIST}=={SDIST_VERSION}"));
        Job::new(format!("downloading llama.cpp ({SDIST} {SDIST_VERSION}, 77 MB)"), "llama-download", command)
            .run(ui)?;
        let sum = sha256(&archive)?;
        ensure!(sum == SDIST_SHA256, "{}: sha256 is {sum}, not {SDIST_SHA256}", archive.display());
    }
    // Unpacked beside its place and renamed, so that an interrupted run leaves nothing that looks whole.
    let unpacked = paths::target().join("llama-src.part");
    let mut command = Command::new(venv.python());
    command.args(["-m", "tarfile", "-e"]).arg(&archive).arg(&unpacked);
    Job::new("unpacking llama.cpp", "llama-unpack", command).run(ui)?;
    fs::create_dir_all(&dir)?;
    let _ = fs::remove_dir_all(dir.join(&stem));
    fs::rename(unpacked.join(&stem), dir.join(&stem))?;
    Ok(source)
}

fn sha256(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut File::open(path).with_context(|| path.display().to_string())?, &mut hash)?;
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
}

/// The tree of the crate `llama-cpp-sys-2`, brought by cargo, which also checks it against the registry's checksum.
///
/// # Errors
/// When cargo cannot bring it, or the checksum is not the pinned one.
pub fn next_version(ui: &Ui) -> Result<Source> {
    // A package of its own, outside the workspace, only so that cargo fetches the crate.
    let scratch = paths::target().join("llama-026-src");
    fs::create_dir_all(scratch.join("src"))?;
    fs::write(scratch.join("src/lib.rs"), "")?;
    let manifest = scratch.join("Cargo.toml");
    let text = format!(
        "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\n{CRATE} = \"={CRATE_VERSION}\"\n\n[workspace]\n"
    );
    fs::write(&manifest, text)?;
    let mut command = cargo("metadata");
    command.args(["--format-version", "1", "--manifest-path"]).arg(&manifest);
    let json =
        Job::new(format!("bringing ggml 0.26 ({CRATE} {CRATE_VERSION})"), "llama-026-fetch", command).capture(ui)?;
    let lock = fs::read_to_string(scratch.join("Cargo.lock"))?;
    ensure!(lock.contains(CRATE_SHA256), "{CRATE} {CRATE_VERSION} is not the pinned one (sha256 {CRATE_SHA256})");

    let metadata: Metadata = serde_json::from_str(&json).context("cargo metadata")?;
    let package = metadata.packages.into_iter().find(|p| p.name == CRATE).context("cargo did not bring the crate")?;
    let dir = package.manifest_path.parent().context("a manifest has a directory")?.join("llama.cpp");
    Ok(Source { dir, identity: format!("{CRATE}-{CRATE_VERSION}"), own: false })
}

/// The cargo that runs us, in the repository.
pub fn cargo(verb: &str) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.arg(verb).current_dir(paths::root());
    command
}
