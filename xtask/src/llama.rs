//! Builds llama.cpp under `target/`: the programs that load plugins, and two more builds that only tests need.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::Result;

use crate::paths;
use crate::run::{Job, Ui, make_percent};
use crate::source::{self, Source};
use crate::toolchain;

/// The programs of `target/llama/bin`.
const PROGRAMS: &[&str] = &[
    "llama-bench",
    "llama-completion",
    "llama-perplexity",
    "llama-batched-bench",
    "llama-quantize",
    "llama-imatrix",
    "llama-server",
    "ggml-rpc-server",
    "test-backend-ops",
    "test-llama-archs",
];

/// One way to build llama.cpp.
struct Build {
    /// The directory under `target/`, and the log's name.
    name: &'static str,
    title: &'static str,
    options: Vec<String>,
    targets: &'static [&'static str],
    /// Our own programs to link against it.
    tools: &'static [&'static str],
    /// Looks at every file again even where a stamp says that all is built.
    always: bool,
}

/// A finished build.
pub struct Llama {
    /// The sources it was built from.
    pub source: PathBuf,
    /// Its programs and shared libraries.
    pub bin: PathBuf,
}

impl Llama {
    /// Whether a program or a library of it is there.
    fn has(&self, target: &str) -> bool {
        self.program(target).exists() || self.program(&format!("lib{target}.so")).exists()
    }

    /// A program of it.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }
}

/// The build that loads plugins: `target/llama`.
///
/// # Errors
/// When a step fails.
pub fn plugins(ui: &Ui) -> Result<Llama> {
    let source = source::pinned_or_own(ui)?;
    // ggml refuses GGML_NATIVE together with loadable backends, so the host's features are named one by one.
    let mut options = host_features(&cpuinfo());
    options.extend(
        ["-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_RPC=ON", "-DGGML_NATIVE=OFF"].map(String::from),
    );
    let build =
        Build { name: "llama", title: "llama.cpp", options, targets: PROGRAMS, tools: &["logits"], always: source.own };
    let llama = build.ensure(ui, &source)?;
    write_hints(ui, &source)?;
    Ok(llama)
}

/// llama.cpp linked statically with HiNa by the build flag: `target/llama-static`. Its only program tests every
/// architecture; libllama is compiled quickly (-O1), since the models of that test are tiny.
///
/// # Errors
/// When a step fails.
pub fn linked(ui: &Ui) -> Result<Llama> {
    let source = source::pinned_or_own(ui)?;
    let hook = paths::root().join("ggml-backend/ggml-hina.cmake");
    let mut options = quick();
    options.push(format!("-DCMAKE_PROJECT_ggml_INCLUDE={}", hook.display()));
    options.push("-DBUILD_SHARED_LIBS=OFF".into());
    let build = Build {
        name: "llama-static",
        title: "llama.cpp with HiNa linked in",
        options,
        targets: &["test-llama-archs"],
        tools: &[],
        // The hook builds our own crate, which changes: let make look.
        always: true,
    };
    build.ensure(ui, &source)
}

/// libllama of ggml 0.26, for the plugin interface's version 3: `target/llama-026`.
///
/// # Errors
/// When a step fails.
pub fn next_version(ui: &Ui) -> Result<Llama> {
    let source = source::next_version(ui)?;
    let mut options = quick();
    options.extend(["-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TOOLS=OFF"].map(String::from));
    options.push("-DLLAMA_BUILD_TESTS=OFF".into());
    let build = Build {
        name: "llama-026",
        title: "libllama of ggml 0.26",
        options,
        targets: &["llama"],
        tools: &["logits"],
        always: false,
    };
    build.ensure(ui, &source)
}

/// Options that build fast and run well enough for tiny models.
fn quick() -> Vec<String> {
    ["-DGGML_NATIVE=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"].map(String::from).into()
}

/// Options of every build: only what is asked for, and nothing that looks beyond this machine.
fn common_options() -> Vec<String> {
    let off = ["EXAMPLES", "APP", "UI"].map(|part| format!("-DLLAMA_BUILD_{part}=OFF"));
    let mut options = vec!["-DCMAKE_BUILD_TYPE=Release".into(), "-DLLAMA_USE_PREBUILT_UI=OFF".into()];
    options.extend(off);
    options.push("-DLLAMA_OPENSSL=OFF".into());
    options
}

impl Build {
    fn dir(&self) -> PathBuf {
        paths::target().join(self.name)
    }

    /// Configures and builds what is missing. A stamp of everything that went in says that nothing is.
    fn ensure(&self, ui: &Ui, source: &Source) -> Result<Llama> {
        let cxx = toolchain::cxx()?;
        let dir = self.dir();
        let llama = Llama { source: source.dir.clone(), bin: dir.join("bin") };
        let (configured, built) = (dir.join(".configured"), dir.join(".built"));
        let options = [&self.options[..], &tile_config(&cpuinfo())].concat();
        let recipe = format!("{}\n{}\n{}\n", source.identity, source.dir.display(), options.join("\n"));
        let wanted = format!("{recipe}{}\n", self.targets.join(" "));

        if read(&configured) != recipe {
            let _ = fs::remove_dir_all(&dir);
            self.configure(ui, source, &cxx, &options)?;
            fs::write(&configured, &recipe)?;
        }
        let missing = self.targets.iter().any(|target| !llama.has(target));
        if self.always || missing || read(&built) != wanted {
            self.make(ui)?;
            fs::write(&built, &wanted)?;
        }
        for tool in self.tools {
            build_tool(ui, &llama, &cxx, tool)?;
        }
        Ok(llama)
    }

    fn configure(&self, ui: &Ui, source: &Source, cxx: &Path, options: &[String]) -> Result<()> {
        let mut command = Command::new(toolchain::cmake(ui)?);
        // PyPI's ninja loops on "manifest still dirty"; make works everywhere.
        command.args(["-G", "Unix Makefiles", "-S"]).arg(&source.dir).arg("-B").arg(self.dir());
        command.arg(format!("-DCMAKE_CXX_COMPILER={}", cxx.display()));
        command.args(common_options()).args(options);
        Job::new(format!("configuring {}", self.title), &format!("{}-configure", self.name), command).run(ui).map(drop)
    }

    fn make(&self, ui: &Ui) -> Result<()> {
        let jobs = thread::available_parallelism().map_or(2, |n| n.get());
        let mut command = Command::new(toolchain::cmake(ui)?);
        command.arg("--build").arg(self.dir()).arg(format!("-j{jobs}")).arg("--target").args(self.targets);
        let log = format!("{}-build", self.name);
        Job::new(format!("building {}", self.title), &log, command).percent(make_percent).run(ui).map(drop)
    }
}

/// One of our own programs (`xtask/cpp/NAME.cpp`), linked against a build. `target/…/bin/hina-NAME`.
fn build_tool(ui: &Ui, llama: &Llama, cxx: &Path, name: &str) -> Result<()> {
    let (from, to) = (paths::asset(&format!("cpp/{name}.cpp")), llama.program(&format!("hina-{name}")));
    if newer(&to, &from) && newer(&to, &llama.program("libllama.so")) {
        return Ok(());
    }
    let mut command = Command::new(cxx);
    command.args(["-std=c++17", "-O1", "-Wall", "-Wextra"]).arg(&from).arg("-o").arg(&to);
    for include in ["include", "ggml/include", "ggml/src"] {
        command.arg("-I").arg(llama.source.join(include));
    }
    command.arg("-L").arg(&llama.bin).arg(format!("-Wl,-rpath,{}", llama.bin.display()));
    command.args(["-lllama", "-lggml", "-lggml-base"]);
    let build = llama.bin.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
    Job::new(format!("compiling {name}.cpp for {build}"), &format!("{build}-{name}"), command).run(ui).map(drop)
}

fn newer(file: &Path, than: &Path) -> bool {
    let time = |path: &Path| fs::metadata(path).and_then(|m| m.modified());
    matches!((time(file), time(than)), (Ok(a), Ok(b)) if a >= b)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Tells build.rs where ggml's headers and libclang are, so that a plain `cargo build` works from now on.
fn write_hints(ui: &Ui, source: &Source) -> Result<()> {
    let ggml = source.dir.join("ggml");
    let text = format!(
        "include={}\nsrc={}\nlibclang={}\n",
        ggml.join("include").display(),
        ggml.join("src").display(),
        toolchain::libclang(ui)?.display()
    );
    let hints = paths::target().join("llama/hina.env");
    if read(&hints) != text {
        fs::write(hints, text)?;
    }
    Ok(())
}

/// What Linux says of the CPUs.
pub fn cpuinfo() -> String {
    fs::read_to_string("/proc/cpuinfo").unwrap_or_default()
}

/// What makes ggml's own AMX kernels right on a host that has AMX, whatever compiler there is. gcc 12's `_tile_loadconfig` says that
/// it reads eight bytes; the other 56, which shape the tiles, are then never written, and the first tile load is SIGILL.
fn tile_config(cpuinfo: &str) -> Vec<String> {
    let amx = cpu_flags(cpuinfo).contains(&"amx_tile");
    let header = paths::asset("cpp/tile-config.h");
    if amx { vec![format!("-DCMAKE_CXX_FLAGS=-include \"{}\"", header.display())] } else { Vec::new() }
}

/// ggml's build options for the features in `/proc/cpuinfo`.
fn host_features(cpuinfo: &str) -> Vec<String> {
    const FEATURES: &[(&str, &[&str])] = &[
        ("SSE42", &["sse4_2"]),
        ("AVX", &["avx"]),
        ("AVX2", &["avx2"]),
        ("BMI2", &["bmi2"]),
        ("FMA", &["fma"]),
        ("F16C", &["f16c"]),
        ("AVX_VNNI", &["avx_vnni"]),
        ("AVX512", &["avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"]),
        ("AVX512_VBMI", &["avx512vbmi"]),
        ("AVX512_VNNI", &["avx512_vnni"]),
        ("AVX512_BF16", &["avx512_bf16"]),
        ("AMX_TILE", &["amx_tile"]),
        ("AMX_INT8", &["amx_int8"]),
        ("AMX_BF16", &["amx_bf16"]),
    ];
    let flags = cpu_flags(cpuinfo);
    let has = |needs: &[&str]| needs.iter().all(|need| flags.contains(need));
    FEATURES.iter().map(|(name, needs)| format!("-DGGML_{name}={}", if has(needs) { "ON" } else { "OFF" })).collect()
}

/// The feature names of the first CPU in `/proc/cpuinfo`.
pub fn cpu_flags(cpuinfo: &str) -> Vec<&str> {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':'));
    line.map_or_else(Vec::new, |(_, flags)| flags.split_whitespace().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_of_a_cpu() {
        let info = "processor\t: 0\nflags\t\t: fpu sse4_2 avx avx2 avx512f avx512cd\nprocessor\t: 1\n";
        let options = host_features(info);
        assert!(options.contains(&"-DGGML_AVX2=ON".to_string()));
        // Half of what AVX512 needs is not enough.
        assert!(options.contains(&"-DGGML_AVX512=OFF".to_string()));
        assert!(options.contains(&"-DGGML_AMX_TILE=OFF".to_string()));
    }

    #[test]
    fn the_tile_configuration_is_mended_where_there_is_amx() {
        assert_eq!(tile_config("flags : avx2 amx_bf16 amx_tile amx_int8\n").len(), 1);
        assert!(tile_config("flags : avx2 avx512f\n").is_empty());
    }

    #[test]
    fn no_cpuinfo_no_features() {
        assert!(host_features("").iter().all(|option| option.ends_with("=OFF")));
    }
}
