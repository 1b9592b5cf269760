//! `cargo xtask numa-vm`: the crate's NUMA code against a real kernel with two nodes, in a virtual machine.
//!
//! Debian's cloud kernel, unpacked and not installed, runs under qemu in software with one static program as all there is:
//! `tests/numa_vm.rs`. It switches the machine off when it is done.

use std::fs::{self, File};
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use cpio::NewcBuilder;

use crate::paths;
use crate::run::{Job, Ui};
use crate::source::cargo;
use crate::test::Outcome;

const QEMU: &str = "qemu-system-x86_64";
/// Depends on the newest kernel of its kind.
const KERNEL: &str = "linux-image-cloud-amd64";
/// What the program in the machine prints last when all went well.
const PASSED: &str = "numa-vm: all checks passed";
/// Seconds that the machine may take; about 20 on a free core.
const LIMIT: &str = "400";

/// The two nodes: two CPUs each, memory enough that the kernel gives huge pages, a distance that is not the default one.
const NODES: &[&str] = &[
    "-smp",
    "4",
    "-m",
    "1024",
    "-object",
    "memory-backend-ram,id=m0,size=512M",
    "-object",
    "memory-backend-ram,id=m1,size=512M",
    "-numa",
    "node,nodeid=0,cpus=0-1,memdev=m0",
    "-numa",
    "node,nodeid=1,cpus=2-3,memdev=m1",
    "-numa",
    "dist,src=0,dst=1,val=21",
];

/// Brings what is missing, boots, and reports.
///
/// # Errors
/// When a step fails, or a check in the machine.
pub fn run(ui: &Ui) -> Result<Outcome> {
    if let Some(why) = missing(ui)? {
        return Ok(Outcome::Skipped(why));
    }
    let kernel = match kernel()? {
        Some(kernel) => kernel,
        None => download_kernel(ui)?,
    };
    let initramfs = dir().join("initramfs.cpio");
    write_initramfs(&program(ui)?, &initramfs)?;
    let text = Job::new("booting a machine with two NUMA nodes", "numa-vm", machine(&kernel, &initramfs)).run(ui)?;
    let lines = || text.lines().filter_map(|l| Some(&l[l.find("numa-vm: ")?..]));
    lines().for_each(|line| ui.say(line));
    ensure!(lines().any(|line| line.trim_end() == PASSED), "{}", crate::run::tail(&paths::log("numa-vm"))?);
    Ok(Outcome::Passed(format!("{} checks", lines().filter(|l| l.contains(": ok: ")).count())))
}

fn dir() -> PathBuf {
    paths::target().join("numa-vm")
}

/// Why the machine cannot run here, after trying to install what it needs.
fn missing(ui: &Ui) -> Result<Option<String>> {
    if works("apt-get") && works("dpkg-deb") && is_root() && !works(QEMU) {
        let apt = |args: &[&str]| {
            let mut command = Command::new("apt-get");
            command.args(args).env("DEBIAN_FRONTEND", "noninteractive");
            command
        };
        Job::new("apt-get update", "numa-vm-apt", apt(&["update"])).run(ui)?;
        let install = apt(&["install", "--yes", "--no-install-recommends", "qemu-system-x86"]);
        Job::new("installing qemu-system-x86", "numa-vm-qemu", install).run(ui)?;
    }
    if !works(QEMU) {
        return Ok(Some(format!("{QEMU} is missing. Debian, Ubuntu: apt install qemu-system-x86")));
    }
    if kernel()?.is_none() && !(works("apt-get") && works("dpkg-deb")) {
        return Ok(Some(format!("only Debian has {KERNEL}; put a kernel with NUMA at {}/vmlinuz", dir().display())));
    }
    Ok(None)
}

fn works(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0)
}

/// The kernel that is there already.
fn kernel() -> Result<Option<PathBuf>> {
    let path = dir().join("vmlinuz");
    Ok(path.try_exists()?.then_some(path))
}

/// Downloads the package of the newest cloud kernel and takes the kernel out of it.
fn download_kernel(ui: &Ui) -> Result<PathBuf> {
    let dir = dir().join("kernel");
    fs::create_dir_all(&dir)?;
    let mut command = Command::new("apt-cache");
    command.args(["depends", KERNEL]);
    let depends = Job::new(format!("looking for {KERNEL}"), "numa-vm-depends", command).capture(ui)?;
    let package = kernel_package(&depends)
        .with_context(|| format!("apt does not know {KERNEL}: `apt-get update`, on Debian, brings its lists"))?;
    let mut command = Command::new("apt-get");
    command.args(["download", package]).current_dir(&dir);
    Job::new(format!("downloading {package}"), "numa-vm-download", command).run(ui)?;
    let is_package = |path: &PathBuf| path.extension().is_some_and(|e| e == "deb");
    let deb = files(&dir)?.into_iter().find(is_package).context("apt-get download left no package")?;
    let mut command = Command::new("dpkg-deb");
    command.arg("--extract").args([&deb, &dir]);
    Job::new(format!("unpacking {package}"), "numa-vm-unpack", command).run(ui)?;
    let is_kernel = |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"));
    let image = files(&dir.join("boot"))?.into_iter().find(is_kernel).context("the package has no kernel")?;
    let kernel = self::dir().join("vmlinuz");
    fs::rename(image, &kernel)?;
    fs::remove_dir_all(dir)?;
    Ok(kernel)
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect()
}

/// The package in `apt-cache depends`' answer.
fn kernel_package(depends: &str) -> Option<&str> {
    depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).filter(|p| p.starts_with("linux-image-"))
}

/// Builds the test program with the C library inside.
fn program(ui: &Ui) -> Result<PathBuf> {
    let mut command = cargo("test");
    command.args(["--package", "ggml-hina", "--no-default-features", "--test", "numa_vm", "--no-run"]);
    // A target of its own, so that build scripts are not static too.
    command.args(["--target", "x86_64-unknown-linux-gnu", "--message-format", "json", "--target-dir"]);
    command.arg(dir().join("build"));
    command.env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols");
    let messages = Job::new("building the test program", "numa-vm-build", command).capture(ui)?;
    executable(&messages).context("cargo named no program")
}

/// The program in cargo's messages.
fn executable(messages: &str) -> Option<PathBuf> {
    let message = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok();
    let path =
        |m: serde_json::Value| (m["target"]["name"] == "numa_vm").then(|| Some(m["executable"].as_str()?.into()))?;
    messages.lines().filter_map(message).find_map(path)
}

/// An archive of directories to mount things on, a console, and the program as `/init`.
fn write_initramfs(program: &Path, to: &Path) -> Result<()> {
    const DIRECTORY: u32 = 0o040_755;
    const DEVICE: u32 = 0o020_600;
    const PROGRAM: u32 = 0o100_755;
    let init = fs::read(program)?;
    let console = NewcBuilder::new("dev/console").mode(DEVICE).rdev_major(5).rdev_minor(1);
    let mut entries = vec![(NewcBuilder::new("dev").mode(DIRECTORY), Vec::new()), (console, Vec::new())];
    entries.extend(["proc", "sys", "tmp"].map(|name| (NewcBuilder::new(name).mode(DIRECTORY), Vec::new())));
    entries.push((NewcBuilder::new("init").mode(PROGRAM), init));
    cpio::write_cpio(entries.into_iter().map(|(b, data)| (b, Cursor::new(data))), File::create(to)?)?;
    Ok(())
}

/// The machine, which ends by itself or after [`LIMIT`] seconds.
fn machine(kernel: &Path, initramfs: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args([LIMIT, QEMU, "-accel", "tcg", "-cpu", "max"]).args(NODES);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs);
    command.args(["-append", "console=ttyS0 quiet panic=-1 -- nodes=2"]);
    command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
    command
}

/// The task by itself: true when the checks passed or could not run here.
///
/// # Errors
/// As [`run`].
pub fn task(ui: &Ui) -> Result<()> {
    match run(ui)? {
        Outcome::Passed(what) => ui.say(&format!("passed: {what}")),
        Outcome::Skipped(why) => bail!("cannot run here: {why}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apt_names_the_kernel() {
        let answer = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-57-cloud-amd64\n";
        assert_eq!(kernel_package(answer), Some("linux-image-6.1.0-57-cloud-amd64"));
        assert_eq!(kernel_package("linux-image-cloud-amd64\n"), None);
    }

    #[test]
    fn cargo_names_the_program() {
        let messages = "{\"reason\":\"build-script-executed\"}\n\
                        {\"target\":{\"name\":\"ggml_hina\"},\"executable\":null}\n\
                        {\"target\":{\"name\":\"numa_vm\"},\"executable\":\"/t/numa_vm-1\"}\n";
        assert_eq!(executable(messages), Some("/t/numa_vm-1".into()));
        assert_eq!(executable(""), None);
    }

    #[test]
    fn the_archive_holds_a_console_and_the_program() {
        let path = std::env::temp_dir().join(format!("xtask-initramfs-{}", std::process::id()));
        write_initramfs(&std::env::current_exe().unwrap(), &path).unwrap();
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(bytes.starts_with(b"070701"));
        assert!(bytes.windows(12).any(|w| w == b"dev/console\0"));
    }
}
