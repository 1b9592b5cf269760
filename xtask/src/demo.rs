//! `cargo xtask demo`: one model through stock llama.cpp and through HiNa, in turn, and one table.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::bench::{self, Row, median};
use crate::logits::{self, Stats};
use crate::model::{self, ModelArgs, Preset, WeightType};
use crate::plugin::{self, Plugin};
use crate::run::Ui;

/// What to show.
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// A GGUF file of your own [default: Qwen3-30B-A3B shapes, 2 layers, BF16, 2.5 GB]
    #[arg(long, short)]
    model: Option<PathBuf>,
    /// Tokens of the prompt
    #[arg(long, short, default_value_t = 512)]
    prompt: u32,
    /// Tokens to generate
    #[arg(long, short = 'n', default_value_t = 32)]
    generate: u32,
    /// Threads [default: llama-bench's own choice]
    #[arg(long, short)]
    threads: Option<u32>,
    /// Rounds; each runs stock and HiNa once, and the medians are shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

/// How far the logits may be apart, as NMSE. Stock llama.cpp's own paths (a batch, or the same tokens one by one) differ by
/// about 1e-5 in such models, from rounding to BF16 in between; a wrong product shows as 1e-2 and more.
const AGREE: f64 = 1e-4;

/// All rows of one side.
#[derive(Default)]
struct Side(Vec<Row>);

impl Side {
    /// The median of the tests that generate, or of those that read a prompt.
    fn tokens_per_second(&self, generate: bool) -> f64 {
        median(self.0.iter().filter(|row| (row.n_gen > 0) == generate).map(|row| row.avg_ts).collect())
    }
}

/// Brings and builds what is missing, measures, and prints the table. False when the logits do not agree.
///
/// # Errors
/// When a step fails.
pub fn run(ui: &Ui, args: &DemoArgs) -> Result<bool> {
    if let Some(model) = &args.model {
        ensure!(model.exists(), "there is no {}", model.display());
    }
    let plugin = plugin::ensure(ui)?;
    let model = match &args.model {
        Some(path) => path.clone(),
        None => {
            let mut model = ModelArgs::new(Preset::Qwen3, WeightType::Bf16);
            model.layers = Some(2);
            model::ensure(ui, &model)?
        }
    };

    let (stock_logits, hina_logits, stats) = both_logits(ui, &plugin, &model)?;
    let nmse = logits::nmse(&stock_logits, &hina_logits)?;
    let (stock, hina) = measure(ui, args, &plugin, &model)?;
    for line in table(&stock, &hina, args, &stats, nmse) {
        println!("{line}");
    }
    Ok(nmse <= AGREE)
}

fn both_logits(ui: &Ui, plugin: &Plugin, model: &Path) -> Result<(Vec<f32>, Vec<f32>, Stats)> {
    // A short text, so that a big model's logits take seconds.
    const TEXT: &[&str] = &["--batch", "48", "--decode", "4"];
    let stock = logits::of(ui, plugin.stock("hina-logits"), "stock", model, TEXT)?;
    let (hina, stats) = logits::with_stats(ui, plugin.hina("hina-logits"), "hina", model, TEXT)
        .context("the plugin gives no device here: a CPU with AVX2, FMA and F16C is needed")?;
    Ok((stock, hina, stats))
}

/// A B, B A, A B …: slow drift of the machine hits both sides alike.
fn measure(ui: &Ui, args: &DemoArgs, plugin: &Plugin, model: &Path) -> Result<(Side, Side)> {
    let (mut stock, mut hina) = (Side::default(), Side::default());
    for round in 0..args.rounds {
        let order = if round % 2 == 0 { [false, true] } else { [true, false] };
        for with_hina in order {
            let (name, side) = if with_hina { ("HiNa", &mut hina) } else { ("stock", &mut stock) };
            let mut command = if with_hina { plugin.hina("llama-bench") } else { plugin.stock("llama-bench") };
            command.arg("-m").arg(model).args(["-r", "1"]);
            command.args(["-p", &args.prompt.to_string(), "-n", &args.generate.to_string()]);
            if let Some(threads) = args.threads {
                command.args(["-t", &threads.to_string()]);
            }
            let title = format!("round {} of {}, {name}", round + 1, args.rounds);
            let rows = bench::run(ui, &title, &format!("demo-{}-{name}", round + 1), command)?;
            let loaded = rows.iter().all(|row| row.backends.contains("HiNa"));
            ensure!(loaded == with_hina, "llama-bench ran on {:?}, not on {name}", rows.first().map(|r| &r.backends));
            side.0.extend(rows);
        }
    }
    Ok((stock, hina))
}

fn table(stock: &Side, hina: &Side, args: &DemoArgs, stats: &Stats, nmse: f64) -> Vec<String> {
    let mut lines = vec![String::new()];
    if let Some(row) = stock.0.first() {
        lines.push(format!("{}, {} threads", row.cpu_info, row.n_threads));
    }
    lines.push(format!("{:<24}{:>12}{:>12}{:>8}", "tokens/s", "llama.cpp", "HiNa", "ratio"));
    let tests = [(false, "prompt, pp", args.prompt), (true, "generation, tg", args.generate)];
    for (generate, name, count) in tests.into_iter().filter(|(_, _, count)| *count > 0) {
        let (a, b) = (stock.tokens_per_second(generate), hina.tokens_per_second(generate));
        lines.push(format!("{:<24}{a:>12.2}{b:>12.2}{:>8.2}", format!("{name}{count}"), b / a));
    }
    let per_graph = |n: u64| n / stats.graphs.max(1);
    lines.push(format!("HiNa claimed {} of the {} nodes of a graph", per_graph(stats.claimed), per_graph(stats.nodes)));
    let agree = if nmse <= AGREE { "agree" } else { "DO NOT AGREE" };
    lines.push(format!("logits {agree}: NMSE {nmse:.1e} (at most {:.0e})", AGREE));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(rates: &[(u32, f64)]) -> Side {
        let row = |(n_gen, avg_ts): &(u32, f64)| Row {
            cpu_info: "A CPU".into(),
            backends: "CPU".into(),
            n_threads: 2,
            n_gen: *n_gen,
            avg_ts: *avg_ts,
        };
        Side(rates.iter().map(row).collect())
    }

    #[test]
    fn the_table_shows_medians_and_ratios() {
        let stock = side(&[(0, 100.0), (32, 10.0), (0, 300.0), (0, 200.0)]);
        let hina = side(&[(0, 500.0), (32, 11.0)]);
        let args = DemoArgs { model: None, prompt: 512, generate: 32, threads: None, rounds: 1 };
        let stats = Stats { graphs: 2, nodes: 200, claimed: 12, kinds: Default::default() };
        let text = table(&stock, &hina, &args, &stats, 1e-3).join("\n");
        assert!(text.contains("prompt, pp512                 200.00      500.00    2.50"), "{text}");
        assert!(text.contains("generation, tg32               10.00       11.00    1.10"), "{text}");
        assert!(text.contains("6 of the 100 nodes") && text.contains("DO NOT AGREE"), "{text}");
    }
}
