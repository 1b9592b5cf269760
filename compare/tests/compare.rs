//! `hina-compare` as a user runs it, with made-up programs; and, where one is built, with the real llama-bench.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Dir, command, refused, results, text};

fn compare() -> Command {
    command(env!("CARGO_BIN_EXE_hina-compare"))
}

fn with(dir: &Dir, llama: &Path, args: &str) -> Command {
    let mut command = compare();
    command.current_dir(&dir.0).arg("--llama").arg(llama).args(args.split_whitespace());
    command
}

fn run(dir: &Dir, llama: &Path, args: &str) -> Output {
    with(dir, llama, args).output().unwrap()
}

const PLUGIN: &str = "--plugin libggml_hina.so -m model.gguf";

#[test]
fn a_whole_comparison() {
    let dir = Dir::new("whole");
    dir.model(30);
    let llama = dir.llama("");
    let out = run(&dir, &llama, &format!("{PLUGIN} --tests pp8,tg4,tg4@d16 --rounds 2 -o out --page docs/PERF.md"));
    assert!(out.status.success(), "{}", text(&out.stderr));
    let table = text(&out.stdout);
    assert!(table.contains("model (HiNa claims 6 of 50 nodes)"), "{table}");
    assert!(table.contains("tg4@d16        100       150  1.50x       1.50 to 1.50"), "{table}");
    assert!(!table.contains('\u{1b}') && !text(&out.stderr).contains('\u{1b}'), "no colour in a pipe");
    let files = ["depth-model.png", "depth-model.svg", "ratios.png", "ratios.svg", "results.json", "table.md"];
    assert_eq!(results(&dir.path("out")), files);
    let order: Vec<String> = dir.runs();
    assert_eq!(
        order[..8],
        ["CPU 8 0", "HiNa 8 0", "CPU 0 4", "HiNa 0 4", "CPU 0 4", "HiNa 0 4", "HiNa 8 0", "CPU 8 0"]
    );
    let page = fs::read_to_string(dir.path("docs/PERF.md")).unwrap();
    assert!(page.contains("hina-compare --llama") && page.contains("(perf/ratios.png)"), "{page}");
    assert!(dir.path("docs/perf/ratios.png").exists());
}

#[test]
fn an_interrupted_comparison_goes_on_where_it_was() {
    let dir = Dir::new("resume");
    dir.model(30);
    // The third run says that it is there, then hangs.
    let llama = dir.llama("if [ $(wc -l < RUNS) = 3 ]; then exec sleep 60; fi".replace("RUNS", "runs").as_str());
    let args = format!("{PLUGIN} --tests pp8,tg4 --rounds 1 -o out");
    let mut child = with(&dir, &llama, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while dir.runs().len() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(30) && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(10));
    }
    // SAFETY: a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    let said = text(&out.stderr);
    assert!(said.contains("2 runs left") && said.contains("hina-compare --resume out"), "{said}");
    assert!(text(&out.stdout).contains("pp8"), "what is done is shown");

    dir.llama("");
    let out = compare().current_dir(&dir.0).args(["--resume", "out"]).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(dir.runs(), ["CPU 8 0", "HiNa 8 0", "CPU 0 4", "CPU 0 4", "HiNa 0 4"], "only what was missing ran");
    assert!(text(&out.stdout).contains("tg4"));
}

#[test]
fn a_time_limit_ends_in_time_with_what_there_is() {
    let dir = Dir::new("limit");
    dir.model(30);
    let llama = dir.llama("if [ $p = 0 ]; then exec sleep 60; fi");
    let begun = Instant::now();
    let out = run(&dir, &llama, &format!("{PLUGIN} --tests pp8,tg4 --rounds 1 -o out --time-limit 0.03"));
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert!(
        out.status.success() && text(&out.stderr).contains("the time is up with 2 runs left"),
        "{}",
        text(&out.stderr)
    );
    assert!(text(&out.stdout).contains("1.50x"));
}

#[test]
fn a_third_program_that_cannot_run_a_test_leaves_a_gap() {
    let dir = Dir::new("also");
    dir.model(30);
    let llama = dir.llama("");
    dir.program("other/llama-bench", "echo 'error: invalid parameter for argument: -d' >&2; exit 1");
    let out = run(&dir, &llama, &format!("{PLUGIN} --tests tg4@d16 --rounds 1 -o out --also ik=other"));
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(
        text(&out.stderr).contains("warning: ik cannot run tg4@d16") && text(&out.stderr).contains("invalid parameter")
    );
    assert!(text(&out.stdout).contains("1.50x          one round       -      -"), "{}", text(&out.stdout));
}

#[test]
fn a_third_program_without_depth_is_asked_in_its_own_words() {
    let dir = Dir::new("also-gp");
    dir.model(30);
    let llama = dir.llama("");
    let answer = r#"{"n_prompt":16,"n_gen":4,"test":"tg4@pp16","samples_ts":[200.0]}"#;
    dir.program("other/llama-bench", &format!("case $* in *-gp\\ 16,4*) echo '[{answer}]';; *) exit 1;; esac"));
    let out = run(&dir, &llama, &format!("{PLUGIN} --tests tg4@d16 --rounds 1 -o out --also ik=other"));
    assert!(out.status.success() && !text(&out.stderr).contains("warning"), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("200  2.00x"), "{}", text(&out.stdout));
}

#[test]
fn a_third_program_without_llama_batched_bench_leaves_a_gap() {
    let dir = Dir::new("also-batched");
    dir.model(30);
    let llama = dir.llama("");
    let speed = r#"echo '{"pp":8,"tg":2,"pl":2,"n_threads":2,"speed_tg":5.0}'"#;
    dir.program("bin/llama-batched-bench", &format!("{speed}; {speed}"));
    dir.program("other/llama-bench", "exit 1");
    let out = run(&dir, &llama, &format!("{PLUGIN} --tests tg2x2@p8 --rounds 1 --repeats 1 -o out --also ik=other"));
    let said = text(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("note: ") && said.contains("other/llama-batched-bench is not there"), "{said}");
    assert!(said.contains("warning: ik cannot run tg2x2@p8"), "{said}");
    assert!(text(&out.stdout).contains("tg2x2@p8       5.00      5.00  1.00x"), "{}", text(&out.stdout));
}

#[test]
fn bad_input_is_one_sentence() {
    let dir = Dir::new("bad");
    dir.model(30);
    let llama = dir.llama("");
    let go = |llama: &Path, args: &str| run(&dir, llama, args);
    dir.write("text.gguf", "hello there, this is text");
    refused(&go(&llama, "--plugin libggml_hina.so -m text.gguf -o o"), &["text.gguf", "no GGUF"]);
    refused(&go(&llama, "--plugin libggml_hina.so -m none.gguf -o o"), &["none.gguf", "cannot be opened"]);
    refused(&go(&llama, "--plugin none.so -m model.gguf -o o"), &["none.so is not there", "--plugin"]);
    refused(&go(&dir.path("nowhere"), &format!("{PLUGIN} -o o")), &["nowhere/llama-bench is not there", "--llama"]);
    refused(&go(&llama, &format!("{PLUGIN} --tests tg2x2 -o o")), &["llama-batched-bench is not there", "tg2x2@p64"]);
    refused(&go(&llama, &format!("{PLUGIN} --tests tg2 -o model.gguf/o")), &["nothing can be written", "--out"]);
    refused(&go(&llama, &format!("{PLUGIN} --tests tg2 -o o --wrap nonumactl")), &["'nonumactl' (from --wrap)"]);
    assert!(!dir.path("o").exists(), "nothing is left behind");
    refused(
        &go(&llama, &format!("{PLUGIN} --tests tg2 -o s --page model.gguf/x.md")),
        &["nothing can be written", "--page"],
    );
    assert!(dir.runs().is_empty(), "all of that before the first run");

    dir.program(
        "deaf/llama-bench",
        "echo '  CPU: x'; echo 'load_backend: failed to load libggml_hina.so: too new' >&2",
    );
    refused(&go(&dir.path("deaf"), &format!("{PLUGIN} --tests tg2 -o o")), &["does not load", "too new"]);
    dir.program("crash/llama-bench", "case $* in *--list*) echo HiNa;; *) echo bang >&2; kill -SEGV $$;; esac");
    refused(
        &go(&dir.path("crash"), &format!("{PLUGIN} --tests tg2 -o p")),
        &["crashed (signal 11)", "| bang", "runs left", "to see it alone: ", "/crash/llama-bench -m "],
    );
    dir.program("chatty/llama-bench", "case $* in *--list*) echo HiNa;; *) echo hello;; esac");
    refused(
        &go(&dir.path("chatty"), &format!("{PLUGIN} --tests tg2 -o q")),
        &["no JSON that is known", "to see it alone: ", "llama-bench -m"],
    );
    let done = go(&llama, &format!("{PLUGIN} --tests tg2 --rounds 1 -o r"));
    assert!(done.status.success());
    refused(&go(&llama, &format!("{PLUGIN} --tests tg2 -o r")), &["r holds a comparison already", "--resume"]);
    refused(&compare().args(["--resume", "/nonexistent"]).output().unwrap(), &["no comparison was begun"]);
}

#[test]
fn what_cannot_be_written_at_the_end_can_be_written_later() {
    let dir = Dir::new("late");
    dir.model(30);
    // While it runs, a folder takes the place of a plot.
    let llama = dir.llama("mkdir -p out/ratios.png");
    let out = run(&dir, &llama, &format!("{PLUGIN} --tests tg2 --rounds 1 -o out"));
    refused(&out, &["ratios.png cannot be written", "what was measured is kept", "hina-compare --resume out"]);
    fs::remove_dir(dir.path("out/ratios.png")).unwrap();
    let ran = dir.runs();
    assert!(compare().current_dir(&dir.0).args(["--resume", "out"]).output().unwrap().status.success());
    assert_eq!((dir.runs(), results(&dir.path("out")).len()), (ran, 4));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let dir = Dir::new("pipe");
    dir.model(30);
    let llama = dir.llama("");
    let mut child = with(&dir, &llama, &format!("{PLUGIN} --tests tg2 --rounds 1 -o out"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && !text(&out.stderr).contains("panicked"), "{}", text(&out.stderr));
    assert!(dir.path("out/ratios.png").exists());
}

/// With what `cargo xtask llama`, `cargo xtask model tiny` and a release build of the plugin left in `target/`.
#[test]
fn the_real_programs() {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("target");
    let have = |path: PathBuf| path.exists().then_some(path);
    let built = (
        have(target.join("llama/bin/llama-bench")),
        have(target.join("release/libggml_hina.so")),
        have(target.join("models/tiny-bf16.gguf")),
    );
    let (Some(llama), Some(plugin), Some(model)) = built else {
        println!("skipped: target/ lacks llama/bin/llama-bench, release/libggml_hina.so or models/tiny-bf16.gguf");
        return;
    };
    if ggml_hina::isa::Isa::best().is_none() {
        println!("skipped: this CPU has no AVX2");
        return;
    }
    let dir = Dir::new("real");
    let out = compare()
        .current_dir(&dir.0)
        .arg("--llama")
        .arg(llama.parent().unwrap())
        .arg("--plugin")
        .arg(plugin)
        .arg("-m")
        .arg(model)
        .args(["--tests", "pp16,tg2,tg2@d16,tg2x2@p8", "--rounds", "1", "--repeats", "1", "-t", "2", "-o", "out"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let table = text(&out.stdout);
    for word in ["pp16", "tg2@d16", "tg2x2@p8", "HiNa claims"] {
        assert!(table.contains(word), "{table}");
    }
    assert!(!table.contains(" -\n"), "every cell is filled: {table}");
}
