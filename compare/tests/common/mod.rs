//! A folder for one test, and made-up llama-bench programs in it: shell scripts that print what the real ones printed.

// Each test program uses some of it.
#![allow(dead_code)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder that goes away with its test.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("hina-compare-it-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    pub fn program(&self, name: &str, script: &str) -> PathBuf {
        let path = self.write(name, format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// A GGUF file with an expert tensor of `kind`, no data behind it but zeros.
    pub fn model(&self, kind: u32) -> PathBuf {
        let text = |t: &str| [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat();
        let mut out = b"GGUF".to_vec();
        out.extend([3u32.to_le_bytes().as_slice(), &1u64.to_le_bytes(), &2u64.to_le_bytes()].concat());
        out.extend([text("general.architecture"), 8u32.to_le_bytes().into(), text("qwen3moe")].concat());
        out.extend([text("qwen3moe.expert_count"), 4u32.to_le_bytes().into(), 8u32.to_le_bytes().into()].concat());
        out.extend([text("blk.0.ffn_up_exps.weight"), 1u32.to_le_bytes().into(), 64u64.to_le_bytes().into()].concat());
        out.extend([kind.to_le_bytes().as_slice(), &0u64.to_le_bytes()].concat());
        out.resize(out.len().next_multiple_of(32) + 4096, 0);
        self.write("model.gguf", out)
    }

    /// A llama-bench that answers like the real one, at 100 tokens/s, and at 150 with the plugin; each run adds a line to
    /// `runs`. `extra` is shell that runs before the answer.
    pub fn llama(&self, extra: &str) -> PathBuf {
        let answer = r#"
name=CPU; speed=100
if [ -n "$GGML_BACKEND_PATH" ]; then name=HiNa; speed=150; fi
case "$*" in *--list-devices*) echo "  $name: made up"; exit 0;; esac
if [ -n "$GGML_HINA_STATS" ]; then echo '{"graphs":1,"nodes":50,"claimed":6}' > "$GGML_HINA_STATS"; exit 0; fi
depth=0
while [ $# -gt 0 ]; do
  case $1 in -p) p=$2;; -n) n=$2;; -d) depth=$2;; esac; shift
done
echo "$name $p $n" >> RUNS
EXTRA
echo "[{\"build_commit\":\"abc\",\"backends\":\"$name\",\"n_threads\":2,\"n_prompt\":$p,\"n_gen\":$n,\"n_depth\":$depth,\"samples_ts\":[$speed]}]"
"#;
        let runs = self.path("runs");
        self.program("bin/llama-bench", &answer.replace("RUNS", &runs.to_string_lossy()).replace("EXTRA", extra));
        self.write("libggml_hina.so", "not really");
        self.path("bin")
    }

    /// Runs of the made-up llama-bench so far.
    pub fn runs(&self) -> Vec<String> {
        fs::read_to_string(self.path("runs")).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A program of this crate.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    for name in ["GGML_BACKEND_PATH", "GGML_HINA_STATS", "GGML_HINA_DISABLE"] {
        command.env_remove(name);
    }
    // A backtrace would show in an error if one were printed anywhere.
    command.env("RUST_BACKTRACE", "1");
    command
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exit code 2 and one sentence with these words; no backtrace.
pub fn refused(output: &Output, words: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("error: ") && !error.contains("stack backtrace") && !error.contains("panicked"), "{error}");
    for word in words {
        assert!(error.contains(word), "no '{word}' in: {error}");
    }
}

/// Names of the files in a folder that are results, and none that is half-written.
pub fn results(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    assert!(names.iter().all(|n| !n.ends_with(".part") && !n.starts_with(".probe")), "{names:?}");
    names
}
