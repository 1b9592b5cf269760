//! Bindings from the user's own ggml headers, and the C glue.
//!
//! Headers are looked for in `GGML_HINA_GGML_DIR` (a ggml or llama.cpp checkout, or an install prefix), else in the tree
//! that `cargo xtask llama` brought. Struct layouts differ between ggml versions, so nothing is prebuilt.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "plugin")]
    plugin::build();
}

#[cfg(feature = "plugin")]
mod plugin {
    use std::collections::HashMap;
    use std::env;
    use std::ffi::OsString;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::{Command, exit};

    /// What names the checkout to build against.
    const DIR: &str = "GGML_HINA_GGML_DIR";

    /// Where ggml's headers and libraries are.
    struct Ggml {
        include: PathBuf,
        src: PathBuf,
        lib: Option<PathBuf>,
        libclang: Option<PathBuf>,
    }

    pub fn build() {
        for var in [DIR, "GGML_HINA_GGML_LIB", "LIBCLANG_PATH"] {
            println!("cargo::rerun-if-env-changed={var}");
        }
        println!("cargo::rerun-if-changed=ggml-backend");
        let ggml = find();
        bind(&ggml);
        glue(&ggml);
        link(&ggml);
    }

    /// Stops the build with a message and the command that mends it.
    fn stop(what: &str) -> ! {
        println!("cargo::error={what}");
        println!(
            "cargo::error=`cargo xtask llama` brings a llama.cpp tree; {DIR}=/path/to/llama.cpp uses yours; \
             `--no-default-features` builds the kernels without the plugin"
        );
        exit(1)
    }

    /// An environment variable; an empty one counts as not set.
    fn given(name: &str) -> Option<OsString> {
        env::var_os(name).filter(|value| !value.is_empty())
    }

    fn find() -> Ggml {
        let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
        let hint_file = root.join("target/llama/hina.env");
        println!("cargo::rerun-if-changed={}", hint_file.display());
        let hints = fs::read_to_string(&hint_file).unwrap_or_default();
        let hints: HashMap<&str, &str> = hints.lines().filter_map(|l| l.split_once('=')).collect();
        let libclang = hints.get("libclang").map(PathBuf::from);
        let own_lib = given("GGML_HINA_GGML_LIB").map(PathBuf::from);
        if let Some(dir) = given(DIR) {
            let (include, src) = headers_under(Path::new(&dir));
            return Ggml { include, src, lib: own_lib, libclang };
        }
        let (Some(include), Some(src)) = (hints.get("include"), hints.get("src")) else {
            stop(&format!("ggml's headers are not known: {DIR} is not set and {} is not there", hint_file.display()));
        };
        let lib = hints.get("lib").map_or_else(|| root.join("target/llama/bin"), PathBuf::from);
        let (include, src) = (PathBuf::from(include), PathBuf::from(src));
        check(&include, &src);
        Ggml { include, src, lib: own_lib.or(Some(lib)), libclang }
    }

    /// The two header folders of a checkout of llama.cpp or of ggml.
    fn headers_under(dir: &Path) -> (PathBuf, PathBuf) {
        for base in [dir.join("ggml"), dir.to_path_buf()] {
            let (include, src) = (base.join("include"), base.join("src"));
            if include.join("ggml.h").exists() {
                check(&include, &src);
                return (include, src);
            }
        }
        stop(&format!("no include/ggml.h under {DIR}={} (nor under its ggml/)", dir.display()))
    }

    fn check(include: &Path, src: &Path) {
        for (dir, file) in
            [(include, "ggml.h"), (include, "ggml-cpu.h"), (src, "ggml-backend-impl.h"), (src, "ggml-impl.h")]
        {
            println!("cargo::rerun-if-changed={}", dir.join(file).display());
            if !dir.join(file).exists() {
                stop(&format!("{} is missing; the plugin needs ggml's private headers too", dir.join(file).display()));
            }
        }
        let version = fs::read_to_string(src.join("ggml-backend-impl.h")).unwrap_or_default();
        let api = version.lines().find_map(|l| l.trim().strip_prefix("#define GGML_BACKEND_API_VERSION "));
        match api.and_then(|v| v.trim().parse::<u32>().ok()) {
            Some(2 | 3) => {}
            Some(v) if v > 3 => println!("cargo::warning=ggml's backend API is {v}; 2 and 3 are tested"),
            _ => stop(&format!(
                "ggml in {} is too old: its backend API is {}, 2 is the least (ggml 0.25)",
                src.display(),
                api.unwrap_or("unknown")
            )),
        }
    }

    fn bind(ggml: &Ggml) {
        if let (None, Some(dir)) = (given("LIBCLANG_PATH"), &ggml.libclang) {
            // SAFETY: the build script has one thread here.
            unsafe { env::set_var("LIBCLANG_PATH", dir) };
        }
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("ggml.rs");
        let mut builder = bindgen::Builder::default()
            .header("ggml-backend/wrapper.h")
            .clang_arg(format!("-I{}", ggml.include.display()))
            .clang_arg(format!("-I{}", ggml.src.display()))
            .allowlist_function("ggml_.*")
            .allowlist_type("ggml_.*")
            .allowlist_var("GGML_.*")
            .prepend_enum_name(false)
            .layout_tests(false)
            .generate_comments(false)
            .merge_extern_blocks(true);
        // A libclang from PyPI has no compiler headers of its own (stdbool.h): the C compiler's do.
        if let Some(dir) = compiler_headers() {
            builder = builder.clang_arg(format!("-isystem{dir}"));
        }
        match builder.generate() {
            Ok(bindings) => bindings.write_to_file(&out).expect("OUT_DIR is writable"),
            Err(e) => stop(&format!("ggml's headers in {} did not bind: {e}", ggml.include.display())),
        }
    }

    fn compiler_headers() -> Option<String> {
        let compiler = given("CC").unwrap_or_else(|| "cc".into());
        let out = Command::new(compiler).arg("-print-file-name=include").output().ok()?;
        let dir = String::from_utf8(out.stdout).ok()?.trim().to_owned();
        Path::new(&dir).is_dir().then_some(dir)
    }

    fn glue(ggml: &Ggml) {
        // System headers, so that the compiler keeps quiet about what ggml's do.
        let mut build = cc::Build::new();
        for dir in [&ggml.include, &ggml.src] {
            build.flag("-isystem").flag(dir);
        }
        build.file("ggml-backend/glue.c").compile("ggml_hina_glue");
    }

    /// Tests and the plugin link the user's ggml, as ggml's own plugins do; without it the names are found at load time.
    fn link(ggml: &Ggml) {
        let Some(lib) = ggml.lib.as_ref().filter(|l| l.join("libggml-base.so").exists()) else { return };
        println!("cargo::rustc-link-search=native={}", lib.display());
        println!("cargo::rustc-link-arg-tests=-Wl,-rpath,{}", lib.display());
        println!("cargo::rustc-env=GGML_HINA_TEST_LIB={}", lib.display());
        println!("cargo::rustc-link-lib=dylib=ggml");
        println!("cargo::rustc-link-lib=dylib=ggml-base");
    }
}
