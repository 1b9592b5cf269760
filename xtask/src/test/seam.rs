//! The plugin inside llama.cpp's own programs.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{Outcome, Step};
use crate::llama::{cpu_flags, cpuinfo};
use crate::logits::{self, LIMIT};
use crate::model::{self, ModelArgs, Preset, WeightType};
use crate::paths;
use crate::plugin::{self, Plugin};
use crate::run::{Job, Server, Ui};
use crate::toolchain;

/// Each runs real programs with the plugin loaded.
pub const STEPS: &[Step] = &[
    Step { name: "models", about: "`tiny` in each type", needs: &[], run: models },
    Step { name: "ops", about: "test-backend-ops on the claimed types", needs: &["plugin"], run: ops },
    Step { name: "ops-attention", about: "the same for attention, a selection", needs: &["plugin"], run: attention },
    Step { name: "logits", about: "logits of `tiny` as stock's", needs: &["plugin", "models"], run: agree },
    Step { name: "one-split", about: "the graph is one split", needs: &["plugin", "models"], run: one_split },
    Step { name: "load-order", about: "loaded before the CPU backend", needs: &["plugin", "models"], run: load_order },
    Step {
        name: "eval-callback",
        about: "node by node, as imatrix runs it",
        needs: &["plugin", "models"],
        run: eval_callback,
    },
    Step { name: "imatrix", about: "llama-imatrix counts as stock's", needs: &["plugin", "models"], run: imatrix },
    Step { name: "rpc", about: "ggml-rpc-server -d HiNa serves a model", needs: &["plugin", "models"], run: rpc },
    Step { name: "settings", about: "GGML_HINA_* switch off and warn", needs: &["plugin", "models"], run: settings },
];

const TYPES: [WeightType; 3] = [WeightType::Bf16, WeightType::Q8_0, WeightType::F16];
pub const LOGITS: &str = "hina-logits";
/// Tokens that `hina-logits` runs when it is told nothing else: a batch, then single ones.
const TOKENS: usize = 83;

/// How far logits may be from stock's (see [`LIMIT`]). With Q8_0 weights stock quantises activations: its error, where ours are BF16.
pub fn limit(weights: WeightType) -> f64 {
    if weights == WeightType::Q8_0 { 3e-4 } else { LIMIT }
}

/// The reason to skip, on a CPU where HiNa offers nothing.
pub fn unfit() -> Option<Outcome> {
    lacking(&["avx2", "fma", "f16c"], "AVX2, FMA and F16C")
}

/// The reason to skip, on a CPU that lacks one of these `flags` of `/proc/cpuinfo`.
pub fn lacking(flags: &[&str], in_words: &str) -> Option<Outcome> {
    let info = cpuinfo();
    let there = cpu_flags(&info);
    let all = flags.iter().all(|feature| there.contains(feature));
    (!all).then(|| Outcome::Skipped(format!("this CPU has no {in_words}")))
}

/// Ends a step early on such a CPU.
macro_rules! needs_fit_cpu {
    () => {
        if let Some(skipped) = $crate::test::seam::unfit() {
            return Ok(skipped);
        }
    };
}
pub(super) use needs_fit_cpu;

/// `tiny` of one type.
pub fn tiny(ui: &Ui, weights: WeightType) -> Result<PathBuf> {
    model::ensure(ui, &ModelArgs::new(Preset::Tiny, weights))
}

fn models(ui: &Ui) -> Result<Outcome> {
    for weights in TYPES {
        tiny(ui, weights)?;
    }
    Ok(Outcome::Passed(String::new()))
}

fn ops(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let (all, _) = ops_of_claimed_types(ui, plugin::ensure(ui)?.hina("test-backend-ops"), "ops")?;
    Ok(Outcome::Passed(format!("{all} cases")))
}

/// Cases of attention that have every head size, group, mask, sink, ALiBi, softcap, permutation, number of streams and
/// cache type between them; what is left out are large batches on the depths that have thousands of cases.
const ATTENTION: &str = "(kv=(17|64|96|113|128|256|1025|2048|4096|8192|16384),|kv=(512|1024),nb=(1|3),).*\
                         type_K=(f16|bf16|q8_0|f32),type_V=(f16|bf16|q8_0|f32)";

fn attention(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let command = plugin::ensure(ui)?.hina("test-backend-ops");
    let (all, _) = ops_of(ui, command, ["FLASH_ATTN_EXT", ATTENTION], "ops-attention")?;
    Ok(Outcome::Passed(format!("{all} cases")))
}

/// Runs a `test-backend-ops` on the types that HiNa claims; gives back how many cases there are, all passed, and its output.
pub fn ops_of_claimed_types(ui: &Ui, command: Command, log: &str) -> Result<(u32, String)> {
    ops_of(ui, command, ["MUL_MAT_ID", "type_a=(bf16|q8_0)"], log)
}

/// Runs a `test-backend-ops` on an operation's cases that match a pattern.
pub fn ops_of(ui: &Ui, mut command: Command, [op, cases]: [&str; 2], log: &str) -> Result<(u32, String)> {
    command.args(["test", "-b", "HiNa", "-o", op, "-p", cases]);
    let text = Job::new("test-backend-ops", log, command).run(ui)?;
    let (good, all) = ops_passed(&text).context("test-backend-ops did not say how many tests passed")?;
    ensure!(good == all && all > 0, "{good} of {all} tests passed");
    Ok((all, text))
}

/// The two numbers of the line `  7/7 tests passed`.
fn ops_passed(text: &str) -> Option<(u32, u32)> {
    let (good, all) = text.lines().find_map(|line| line.trim().strip_suffix(" tests passed"))?.split_once('/')?;
    Some((good.parse().ok()?, all.parse().ok()?))
}

fn agree(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure(ui)?;
    let mut notes = Vec::new();
    for weights in TYPES {
        let name = format!("{weights:?}").to_lowercase();
        let model = tiny(ui, weights)?;
        let stock = logits::of(ui, plugin.stock(LOGITS), &format!("{name}-stock"), &model, &[])?;
        let (hina, stats) = logits::with_stats(ui, plugin.hina(LOGITS), &format!("{name}-hina"), &model, &[])?;
        let nmse = within(&stock, &hina, limit(weights)).with_context(|| name.clone())?;
        let row = stock.len() / TOKENS;
        // Said, not judged: the first edge of rounding may come with the first token on some CPU.
        let first = logits::nmse(&stock[..row], &hina[..row])?;
        ensure!(weights != WeightType::Bf16 || stats.claimed > 0, "HiNa claimed no node of {}", model.display());
        let alone = without_attention(ui, &plugin, weights, &model).with_context(|| format!("{name}, -fa off"))?;
        notes
            .push(format!("{name} {nmse:.0e} (first token {first:.0e}, -fa off {alone:.0e}), {} nodes", stats.claimed));
    }
    Ok(Outcome::Passed(notes.join("; ")))
}

/// The error without flash attention: attention is then ggml's own in both runs, and HiNa's products alone differ. It has none
/// with F16 weights, so there every bit must be the same. With Q8_0 weights HiNa is told to quantise activations as ggml does.
fn without_attention(ui: &Ui, plugin: &Plugin, weights: WeightType, model: &Path) -> Result<f64> {
    let options = ["--flash-attn", "off"];
    let name = format!("{weights:?}").to_lowercase();
    let stock = logits::of(ui, plugin.stock(LOGITS), &format!("{name}-stock-no-fa"), model, &options)?;
    let mut command = plugin.hina(LOGITS);
    command.env("GGML_HINA_Q8_0", "int8");
    let hina = logits::of(ui, command, &format!("{name}-hina-no-fa"), model, &options)?;
    let limit = match weights {
        WeightType::F16 => 0.0,
        // A step of rounding is that of 127 quants.
        WeightType::Q8_0 => 1e-4,
        _ => LIMIT,
    };
    within(&stock, &hina, limit)
}

/// The error of `b` against `a`, which must be within the limit.
pub fn close(a: &[f32], b: &[f32]) -> Result<f64> {
    within(a, b, LIMIT)
}

/// The error of `b` against `a`, which must be at most `limit`.
pub fn within(a: &[f32], b: &[f32], limit: f64) -> Result<f64> {
    let nmse = logits::nmse(a, b)?;
    ensure!(nmse <= limit, "logits differ from stock's: NMSE {nmse:.1e}, at most {limit:.0e}");
    Ok(nmse)
}

fn one_split(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let model = tiny(ui, WeightType::Bf16)?;
    let mut command = plugin::ensure(ui)?.hina(LOGITS);
    command.env("GGML_SCHED_DEBUG", "2").arg(model).arg(logits::scratch("split.f32")?);
    let text = Job::new("logits with the scheduler's log", "one-split", command).run(ui)?;
    let splits = splits_after_probe(&text).context("llama.cpp did not say how it splits its graph")?;
    let other = splits.iter().find(|line| !line.starts_with("## SPLIT #0: HiNa"));
    ensure!(other.is_none() && !splits.is_empty(), "not one split but, among others: {}", other.unwrap_or(&"none"));
    ensure!(text.contains("Flash Attention enabled"), "llama.cpp does without flash attention");
    Ok(Outcome::Passed(format!("{} graphs", splits.len())))
}

/// The scheduler's lines for the graphs that are run: those before llama.cpp settled on flash attention are probes.
fn splits_after_probe(text: &str) -> Option<Vec<&str>> {
    let (_, run) = text.split_once("sched_reserve: graph:")?;
    Some(run.lines().filter(|line| line.starts_with("## SPLIT #")).collect())
}

fn load_order(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure(ui)?;
    let model = tiny(ui, WeightType::Bf16)?;
    let stock = logits::of(ui, plugin.stock(LOGITS), "order-stock", &model, &[])?;
    let path = plugin.path.to_str().context("the path of the plugin is not UTF-8")?;
    let first = ["--plugin-first", path];
    let (hina, stats) = logits::with_stats(ui, plugin.stock(LOGITS), "order-hina", &model, &first)?;
    ensure!(stats.claimed > 0, "HiNa claimed no node");
    Ok(Outcome::Passed(format!("NMSE {:.0e}", close(&stock, &hina)?)))
}

fn eval_callback(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure(ui)?;
    let model = tiny(ui, WeightType::Bf16)?;
    let options = ["--eval-callback"];
    let stock = logits::of(ui, plugin.stock(LOGITS), "callback-stock", &model, &options)?;
    let (hina, stats) = logits::with_stats(ui, plugin.hina(LOGITS), "callback-hina", &model, &options)?;
    ensure!(stats.claimed > 0, "HiNa claimed no node when they came one by one");
    Ok(Outcome::Passed(format!("NMSE {:.0e}", close(&stock, &hina)?)))
}

/// Counts of experts are a sum of decisions, and a router that is all but undecided decides otherwise when a sum of f32 before it
/// is taken in another order: in BF16 one token in 7000 (one in 2700 with flash attention; between stock with it and stock without,
/// one in 3000). So over the whole text the counts are held against that; over the first 128 tokens they must be
/// the same, but for the one row that on some CPU may be such a tie, and with F16 weights, of which HiNa has no product, over the whole text and in every sum too.
fn imatrix(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure(ui)?;
    let (bf16, f16) = (tiny(ui, WeightType::Bf16)?, tiny(ui, WeightType::F16)?);
    let run = |who: &str, model: &Path, options: &[&str]| -> Result<PathBuf> {
        let kind = model.file_stem().unwrap_or_default().to_string_lossy();
        let name = format!("imatrix-{who}-{kind}{}", options.concat());
        let out = logits::scratch(&format!("{name}.gguf"))?;
        let mut command = if who == "hina" { plugin.hina("llama-imatrix") } else { plugin.stock("llama-imatrix") };
        command.arg("-m").arg(model).arg("-f").arg(paths::asset("data/text.txt"));
        command.args(["-c", "64", "--no-ppl", "-o"]).arg(&out).args(options);
        Job::new(format!("llama-imatrix, {who}"), &name, command).run(ui)?;
        Ok(out)
    };
    let compare = |mode: &str, files: &[PathBuf]| -> Result<String> {
        let mut command = Command::new(toolchain::python(ui)?);
        command.arg(paths::asset("py/same_imatrix.py")).arg(mode).args(files);
        let text = Job::new("comparing them", &format!("imatrix-{mode}"), command).capture(ui)?;
        Ok(text.trim().to_owned())
    };
    let alone = ["-fa", "off"];
    let short = ["-fa", "off", "--chunks", "2"];
    compare("bits", &[run("stock", &f16, &alone)?, run("hina", &f16, &alone)?]).context("F16, -fa off")?;
    let exact = compare("counts", &[run("stock", &bf16, &short)?, run("hina", &bf16, &short)?])
        .context("the first 128 tokens, -fa off")?;
    let whole = compare("near", &[run("stock", &bf16, &[])?, run("hina", &bf16, &[])?, run("stock", &bf16, &alone)?])?;
    Ok(Outcome::Passed(format!("{exact}; whole text: {whole}")))
}

fn rpc(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure(ui)?;
    let model = tiny(ui, WeightType::Bf16)?;
    let stock = logits::of(ui, plugin.stock(LOGITS), "rpc-stock", &model, &[])?;

    // A port that was free a moment ago.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let mut command = plugin.hina("ggml-rpc-server");
    command.args(["-d", "HiNa", "-H", "127.0.0.1", "-p", &port.to_string()]);
    let mut server = Server::start("rpc-server", command)?;
    wait_for(&mut server, port)?;
    let endpoint = format!("127.0.0.1:{port}");
    let served = logits::of(ui, plugin.stock(LOGITS), "rpc-client", &model, &["--rpc", &endpoint])?;
    ensure!(!server.ended()?, "ggml-rpc-server ended by itself: {}", paths::log("rpc-server").display());
    drop(server);
    let log = fs::read_to_string(paths::log("rpc-server"))?;
    ensure!(log.contains("HiNa"), "the server did not run on HiNa: {}", paths::log("rpc-server").display());
    Ok(Outcome::Passed(format!("NMSE {:.0e}", close(&stock, &served)?)))
}

fn wait_for(server: &mut Server, port: u16) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(());
        }
        if server.ended()? {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bail!("ggml-rpc-server does not listen\n{}", crate::run::tail(&paths::log("rpc-server"))?)
}

fn settings(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure(ui)?;
    let model = tiny(ui, WeightType::Bf16)?;
    let run = |name: &str, value: &str| -> Result<String> { with_setting(ui, &plugin, &model, name, value) };

    let text = run("GGML_HINA_DISABLE", "1")?;
    ensure!(!text.contains("claimed"), "GGML_HINA_DISABLE=1 did not switch HiNa off");
    let text = run("GGML_HINA_FUSE", "maybe")?;
    let warnings = text.lines().filter(|line| line.contains("GGML_HINA_FUSE=maybe")).count();
    ensure!(warnings == 1, "an unknown value got {warnings} warnings, not one");
    ensure!(text.contains("claimed"), "an unknown value must leave the default");
    Ok(Outcome::Passed(String::new()))
}

/// What a run on `model` prints, with one more variable set and the counts in its log.
fn with_setting(ui: &Ui, plugin: &Plugin, model: &Path, name: &str, value: &str) -> Result<String> {
    let mut command = plugin.hina(LOGITS);
    command.env("GGML_HINA_STATS", "1").env(name, value).arg(model).arg(logits::scratch("settings.f32")?);
    Job::new(format!("logits, {name}={value}"), "settings", command).run(ui)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_test_backend_ops() {
        assert_eq!(ops_passed("x\n  7/7 tests passed\n  Backend HiNa: OK\n"), Some((7, 7)));
        assert_eq!(ops_passed("  6/7 tests passed"), Some((6, 7)));
        assert_eq!(ops_passed("2/2 backends passed"), None);
    }

    #[test]
    fn probes_are_not_counted_as_splits() {
        let text = "## SPLIT #1: CPU # 1 inputs\nsched_reserve: graph: nodes = 9\n## SPLIT #0: HiNa # 0 inputs\n";
        assert_eq!(splits_after_probe(text), Some(vec!["## SPLIT #0: HiNa # 0 inputs"]));
        assert_eq!(splits_after_probe("## SPLIT #0: HiNa"), None);
    }
}
