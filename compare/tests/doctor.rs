//! `hina-doctor` as a user runs it.

mod common;

use std::process::{Command, Output};

use common::{Dir, command, refused, text};

fn doctor() -> Command {
    command(env!("CARGO_BIN_EXE_hina-doctor"))
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)))
}

#[test]
fn the_exit_code_is_the_worst_finding() {
    let dir = Dir::new("doctor-code");
    let claimed = doctor().arg("-m").arg(dir.model(30)).arg("--json").output().unwrap();
    let left = doctor().arg("-m").arg(dir.model(12)).arg("--json").output().unwrap();
    for output in [&claimed, &left] {
        let report = json(output);
        let has = |level: &str| report["findings"].as_array().unwrap().iter().any(|f| f["level"] == level);
        let want = if has("stop") { 2 } else { i32::from(has("slow")) };
        assert_eq!(output.status.code(), Some(want), "{report:#}");
    }
    // q4_K experts cost speed on any machine.
    assert!(left.status.code() >= Some(1));
    let report = json(&left);
    assert_eq!(report["model"]["groups"][0]["type"], "q4_K");
    assert_eq!(report["model"]["groups"][0]["left"], "no kernel takes this weight type");
    assert!(report["findings"].to_string().contains("of expert weights stay with ggml's CPU backend (q4_K)"));
    assert!(json(&claimed)["model"]["groups"][0]["left"].is_null());
}

#[test]
fn the_page_ends_with_the_command() {
    let dir = Dir::new("doctor-page");
    let model = dir.model(30);
    let out = doctor().arg("-m").arg(&model).args(["--plugin", "/x/libggml_hina.so"]).output().unwrap();
    let page = text(&out.stdout);
    for word in ["CPU ", "HiNa runs on", "NUMA node", "huge pages", "governor", "page cache", "experts", "bf16"] {
        assert!(page.contains(word), "no '{word}' in: {page}");
    }
    let last = page.lines().last().unwrap();
    assert!(
        last.contains("GGML_BACKEND_PATH=/x/libggml_hina.so") && last.contains(&*model.to_string_lossy()),
        "{last}"
    );
    assert!(!page.contains('\u{1b}'), "no colour in a pipe");
    assert!(doctor().output().unwrap().stdout.len() > 200, "no model is needed");
}

#[test]
fn a_plugin_that_does_not_load_stops() {
    let dir = Dir::new("doctor-plugin");
    dir.program("bin/llama-bench", "echo '  CPU: x'; echo 'load_backend: failed to load it: wrong version' >&2");
    let so = dir.write("h.so", "x");
    let out = doctor().arg("--llama").arg(dir.path("bin")).arg("--plugin").arg(so).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stdout).contains("stop") && text(&out.stdout).contains("wrong version"), "{}", text(&out.stdout));
}

#[test]
fn the_command_names_what_was_found() {
    let dir = Dir::new("doctor-found");
    dir.program("bin/llama-bench", "echo '  HiNa: made up'");
    dir.program("bin/llama-server", "exit 1");
    let so = dir.write("h.so", "x");
    let looked = |plugin: bool| {
        let mut command = doctor();
        command.arg("--llama").arg(dir.path("bin"));
        if plugin {
            command.env("GGML_BACKEND_PATH", &so);
        }
        command.output().unwrap()
    };
    let page = text(&looked(true).stdout);
    let last = page.lines().last().unwrap();
    assert!(last.contains("/h.so ") && last.contains("/bin/llama-server -m model.gguf"), "{page}");
    // A release build may lie beside this program: then that one is looked at.
    if !std::path::Path::new(env!("CARGO_BIN_EXE_hina-doctor")).with_file_name("libggml_hina.so").exists() {
        refused(&looked(false), &["no plugin to look at", "--plugin"]);
    }
}

#[test]
fn bad_models_are_one_sentence() {
    let dir = Dir::new("doctor-bad");
    let file = dir.write("notes.txt", "not a model at all");
    refused(&doctor().arg("-m").arg(file).output().unwrap(), &["notes.txt", "no GGUF"]);
    refused(&doctor().args(["-m", "/nonexistent.gguf"]).output().unwrap(), &["/nonexistent.gguf", "cannot be opened"]);
    refused(&doctor().arg("-m").arg(&dir.0).output().unwrap(), &["is not a file"]);
    let mut cut = std::fs::read(dir.model(30)).unwrap();
    cut.truncate(60);
    refused(&doctor().arg("-m").arg(dir.write("cut.gguf", cut)).output().unwrap(), &["cut.gguf is cut off"]);
}
