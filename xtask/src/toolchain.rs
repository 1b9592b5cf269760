//! What is needed to build, found on the machine or brought into a virtual environment under `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::paths;
use crate::run::{Job, Ui};

/// Wheels, pinned: what each is for stands beside its use.
const CMAKE: &str = "cmake==4.4.5";
const LIBCLANG: &str = "libclang==18.1.1";
const GGUF: &str = "gguf==0.19.0";
/// `cmake_language(DEFER)`, which ggml-backend/ggml-hina.cmake needs, came with this one.
const CMAKE_AT_LEAST: (u32, u32) = (3, 19);

/// The virtual environment of xtask.
pub struct Venv(PathBuf);

impl Venv {
    /// Makes it where it is missing.
    ///
    /// # Errors
    /// When there is no python3, or it cannot make environments.
    pub fn ensure(ui: &Ui) -> Result<Self> {
        let venv = Self(paths::target().join("venv"));
        if !venv.stamp("venv").exists() {
            ensure!(works("python3"), "python3 is missing. Debian, Ubuntu: apt install python3 python3-venv");
            let mut command = Command::new("python3");
            command.args(["-m", "venv", "--clear"]).arg(&venv.0);
            Job::new("making a virtual environment in target/venv", "venv", command)
                .run(ui)
                .context("python3 cannot make a virtual environment. Debian, Ubuntu: apt install python3-venv")?;
            fs::write(venv.stamp("venv"), "")?;
        }
        Ok(venv)
    }

    /// Python of this environment.
    pub fn python(&self) -> PathBuf {
        self.0.join("bin/python")
    }

    /// Installs one pinned wheel where it is missing.
    ///
    /// # Errors
    /// When pip fails.
    pub fn install(&self, ui: &Ui, package: &str) -> Result<()> {
        let stamp = self.stamp(package);
        if !stamp.exists() {
            let name = package.split('=').next().unwrap_or(package);
            let mut command = self.pip("install");
            command.arg(package);
            Job::new(format!("installing {package} in target/venv"), &format!("pip-{name}"), command).run(ui)?;
            fs::write(stamp, "")?;
        }
        Ok(())
    }

    /// A `pip` command.
    pub fn pip(&self, verb: &str) -> Command {
        let mut command = Command::new(self.python());
        command.args(["-m", "pip", verb, "--disable-pip-version-check", "--no-input"]);
        command
    }

    fn stamp(&self, what: &str) -> PathBuf {
        self.0.join(format!(".have-{what}"))
    }
}

/// Python with the packages of our scripts (`gguf`, which brings numpy).
///
/// # Errors
/// When it cannot be made or filled.
pub fn python(ui: &Ui) -> Result<PathBuf> {
    let venv = Venv::ensure(ui)?;
    venv.install(ui, GGUF)?;
    Ok(venv.python())
}

/// `cmake`: the machine's own where it is new enough, else the wheel's.
///
/// # Errors
/// When the wheel cannot be installed.
pub fn cmake(ui: &Ui) -> Result<PathBuf> {
    let own = Command::new("cmake").arg("--version").output().ok();
    let version = own.and_then(|out| cmake_version(&String::from_utf8_lossy(&out.stdout)));
    if version.is_some_and(|v| v >= CMAKE_AT_LEAST) {
        return Ok("cmake".into());
    }
    let venv = Venv::ensure(ui)?;
    venv.install(ui, CMAKE)?;
    Ok(venv.0.join("bin/cmake"))
}

fn cmake_version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.strip_prefix("cmake version ")?.split(['.', '\n']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The directory of libclang, which bindgen loads: `LIBCLANG_PATH`, the machine's own, or the wheel's.
///
/// # Errors
/// When the wheel cannot be installed.
pub fn libclang(ui: &Ui) -> Result<PathBuf> {
    if let Some(dir) = paths::given("LIBCLANG_PATH") {
        return Ok(dir.into());
    }
    if let Some(dir) = system_libclang() {
        return Ok(dir);
    }
    let venv = Venv::ensure(ui)?;
    venv.install(ui, LIBCLANG)?;
    let mut command = Command::new(venv.python());
    command.args(["-c", "import clang, os; print(os.path.join(clang.__path__[0], 'native'))"]);
    let out = command.output().context("cannot run the environment's python")?;
    ensure!(out.status.success(), "the libclang wheel does not import: {}", String::from_utf8_lossy(&out.stderr));
    Ok(String::from_utf8(out.stdout)?.trim().into())
}

fn system_libclang() -> Option<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib")
        .ok()?
        .flatten()
        .filter_map(|entry| {
            let version = entry.file_name().to_str()?.strip_prefix("llvm-")?.parse().ok()?;
            let dir = entry.path().join("lib");
            has_libclang(&dir).then_some((version, dir))
        })
        .collect();
    found.sort();
    found.pop().map(|(_, dir)| dir)
}

fn has_libclang(dir: &Path) -> bool {
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    // Not libclang-cpp.so, which is another library.
    let is_libclang = |name: String| name.starts_with("libclang.so");
    fs::read_dir(dir).is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|e| is_libclang(name(e)))))
}

/// The C++ compiler, which must be on the machine.
///
/// # Errors
/// When there is none, or no `make`; the message names the package.
pub fn cxx() -> Result<PathBuf> {
    let chosen = paths::given("CXX").and_then(|cxx| cxx.into_string().ok());
    let candidates = chosen.as_deref().map_or_else(|| vec!["c++", "g++", "clang++"], |cxx| vec![cxx]);
    let Some(cxx) = candidates.iter().find(|name| works(name)) else {
        bail!(
            "no C++ compiler (tried {}). Debian, Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++ make",
            candidates.join(", ")
        );
    };
    ensure!(
        works("make"),
        "make is missing. Debian, Ubuntu: apt install make (or build-essential); Fedora: dnf install make"
    );
    Ok(cxx.into())
}

fn works(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cmake_versions() {
        assert_eq!(cmake_version("cmake version 3.25.1\n\nCMake suite"), Some((3, 25)));
        assert_eq!(cmake_version("cmake version 4.1-rc2\n"), None);
        assert_eq!(cmake_version("zsh: not found"), None);
    }
}
