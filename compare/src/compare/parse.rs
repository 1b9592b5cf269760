//! What llama-bench and llama-batched-bench say, as tokens per second.

use serde::Deserialize;

use super::case::Case;

/// A record of `llama-bench -o json`. Other programs of that name leave some fields out.
#[derive(Clone, Debug, Deserialize)]
struct Bench {
    #[serde(default)]
    build_commit: String,
    #[serde(default)]
    backends: String,
    #[serde(default)]
    model_type: String,
    #[serde(default)]
    n_threads: u32,
    n_prompt: u32,
    n_gen: u32,
    #[serde(default)]
    n_depth: u32,
    /// Only ik_llama.cpp's: `tg16@pp512` is 16 tokens generated after a prompt of 512.
    #[serde(default)]
    test: String,
    #[serde(default)]
    samples_ts: Vec<f64>,
}

impl Bench {
    /// Tokens of the prompt, generated, and in the cache before them.
    fn measured(&self) -> (u32, u32, u32) {
        match self.test == format!("tg{}@pp{}", self.n_gen, self.n_prompt) {
            true => (0, self.n_gen, self.n_prompt),
            false => (self.n_prompt, self.n_gen, self.n_depth),
        }
    }
}

/// A line of `llama-batched-bench --output-format jsonl`.
#[derive(Clone, Debug, Deserialize)]
struct Batched {
    pp: u32,
    tg: u32,
    pl: u32,
    n_threads: u32,
    speed_tg: f64,
}

/// What a run measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Tokens per second of each repetition.
    pub samples: Vec<f64>,
    /// Threads it used.
    pub threads: u32,
    /// The program's own words: commit, backends and model; empty where it does not say.
    pub commit: String,
    /// Names of the backends that computed, separated by commas.
    pub backends: String,
    /// The model's type in the program's words.
    pub model_type: String,
}

/// Reads the output of the program that measures `case`.
///
/// # Errors
/// What is wrong with the output, as a sentence.
pub fn output(case: Case, stdout: &str) -> Result<Measured, String> {
    let measured = match case {
        Case::Prompt { tokens, depth } => bench(stdout, (tokens, 0, depth))?,
        Case::Generate { tokens, depth } => bench(stdout, (0, tokens, depth))?,
        Case::Parallel { tokens, sequences, prompt } => batched(stdout, (prompt, tokens, sequences))?,
    };
    if measured.samples.is_empty() || measured.samples.iter().any(|s| !s.is_finite() || *s <= 0.0) {
        return Err(format!("{} printed no tokens per second for {case}", case.program()));
    }
    Ok(measured)
}

fn bench(stdout: &str, want: (u32, u32, u32)) -> Result<Measured, String> {
    let records: Vec<Bench> =
        serde_json::from_str(stdout.trim()).map_err(|e| format!("llama-bench printed no JSON that is known ({e})"))?;
    let found = records.into_iter().find(|r| r.measured() == want);
    let found = found.ok_or("llama-bench left the test out")?;
    Ok(Measured {
        samples: found.samples_ts,
        threads: found.n_threads,
        commit: found.build_commit,
        backends: found.backends,
        model_type: found.model_type,
    })
}

/// The first line is the warm-up: it maps the weights' pages.
fn batched(stdout: &str, want: (u32, u32, u32)) -> Result<Measured, String> {
    let mut measured = Measured::default();
    let lines = stdout.lines().filter(|l| l.trim_start().starts_with('{'));
    for line in lines.skip(1) {
        let line: Batched = serde_json::from_str(line)
            .map_err(|e| format!("llama-batched-bench printed no JSON that is known ({e})"))?;
        if (line.pp, line.tg, line.pl) == want {
            measured.samples.push(line.speed_tg);
            measured.threads = line.n_threads;
        }
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOCK: &str = include_str!("../../tests/fixtures/llama-bench-stock.json");
    const HINA: &str = include_str!("../../tests/fixtures/llama-bench-hina.json");
    const BATCHED: &str = include_str!("../../tests/fixtures/llama-batched-bench.jsonl");

    fn case(text: &str) -> Case {
        text.parse().unwrap()
    }

    #[test]
    fn real_llama_bench() {
        let pp = output(case("pp16"), STOCK).unwrap();
        assert_eq!((pp.samples.len(), pp.threads, pp.backends.as_str()), (2, 2, "CPU"));
        assert!(pp.model_type.starts_with("qwen3moe") && !pp.commit.is_empty());
        let deep = output(case("tg4@d32"), STOCK).unwrap();
        assert_ne!(deep.samples, output(case("tg4"), STOCK).unwrap().samples);
        assert_eq!(output(case("tg4"), HINA).unwrap().backends, "HiNa");
    }

    #[test]
    fn real_llama_batched_bench_without_its_warm_up() {
        let four = output(case("tg8x4@p32"), BATCHED).unwrap();
        assert_eq!((four.samples.len(), four.threads), (2, 2));
        let first: Batched = serde_json::from_str(BATCHED.lines().find(|l| l.starts_with('{')).unwrap()).unwrap();
        assert!(!four.samples.contains(&first.speed_tg));
    }

    #[test]
    fn a_llama_bench_that_knows_no_depth() {
        let old = r#"[{"build_commit":"a","n_prompt":512,"n_gen":0,"avg_ts":1.0,"samples_ts":[10.5]}]"#;
        assert_eq!(output(case("pp512"), old).unwrap().samples, [10.5]);
        // As ik_llama.cpp's prints it for -gp 512,16.
        let after =
            r#"[{"n_prompt":512,"n_gen":16,"avg_ts":4273.9,"test":"tg16@pp512","samples_ts":[6207.75,2340.17]}]"#;
        assert_eq!(output(case("tg16@d512"), after).unwrap().samples, [6207.75, 2340.17]);
        // A prompt and generation timed together are neither.
        let both = after.replace("tg16@pp512", "pp512+tg16");
        assert!(output(case("tg16@d512"), &both).is_err() && output(case("pp512"), &both).is_err());
    }

    #[test]
    fn what_is_missing_or_broken_is_said() {
        let e = |text, out| output(case(text), out).unwrap_err();
        assert!(e("pp17", STOCK).contains("left the test out"));
        assert!(e("pp16", "").contains("no JSON"));
        assert!(e("pp16", &STOCK[..STOCK.len() / 2]).contains("no JSON"));
        assert!(e("tg8x2@p32", BATCHED).contains("no tokens per second"));
        let nothing = r#"[{"n_prompt":16,"n_gen":0,"samples_ts":[]}]"#;
        assert!(e("pp16", nothing).contains("no tokens per second for pp16"));
    }
}
