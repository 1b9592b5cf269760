//! `cargo xtask model`: GGUF files of random weights with real layer shapes, written by `py/model.py`.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use clap::{Args, ValueEnum};
use sha2::{Digest, Sha256};

use crate::paths;
use crate::run::{Job, Ui, script_percent};
use crate::toolchain;

/// A model's layer shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// A few MiB of Qwen3-MoE with shapes that divide by nothing handy
    Tiny,
    /// 128 experts, top 8; 4 layers
    #[value(name = "qwen3-30b-a3b")]
    Qwen3,
    /// 8 experts, top 2; 2 layers
    #[value(name = "mixtral-8x7b")]
    Mixtral,
    /// 64 experts, top 8, and a shared expert; 1 layer
    #[value(name = "qwen2-57b-a14b")]
    Qwen2,
    /// Latent attention (MLA); 64 of the 256 experts, top 8; 1 layer
    #[value(name = "deepseek-v3")]
    DeepSeek,
}

/// The type of the weight matrices; norms, biases and routers are F32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum WeightType {
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
    F16,
}

/// Which model to write.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// The layer shapes
    #[arg(value_enum)]
    pub preset: Preset,
    /// The type of the weights
    #[arg(long = "type", value_enum, default_value = "bf16")]
    pub weights: WeightType,
    /// Number of layers [default: the preset's]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub layers: Option<u32>,
    /// Number of experts in each layer [default: the preset's]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub experts: Option<u32>,
    /// Size of the vocabulary [default: 4096; 601 for tiny]
    #[arg(long, value_parser = clap::value_parser!(u32).range(300..=2_000_000))]
    pub vocab: Option<u32>,
}

impl ModelArgs {
    /// The preset as it is.
    pub fn new(preset: Preset, weights: WeightType) -> Self {
        Self { preset, weights, layers: None, experts: None, vocab: None }
    }

    /// `PRESET-TYPE.gguf`; counts that are not the preset's are added to the name.
    fn file_name(&self) -> String {
        let mut name = format!("{}-{}", value_name(&self.preset), value_name(&self.weights));
        for (letter, count) in [("l", self.layers), ("e", self.experts), ("v", self.vocab)] {
            if let Some(count) = count {
                let _ = write!(name, "-{letter}{count}");
            }
        }
        name + ".gguf"
    }
}

fn value_name(value: &impl ValueEnum) -> String {
    value.to_possible_value().expect("no variant is hidden").get_name().into()
}

/// Writes the model under `target/models` unless the same one is there, and gives back its path.
///
/// # Errors
/// When the environment cannot be made or the script fails (a full disk, for one).
pub fn ensure(ui: &Ui, args: &ModelArgs) -> Result<PathBuf> {
    let file = args.file_name();
    let path = paths::target().join("models").join(&file);
    let stamp = path.with_extension("gguf.stamp");
    let made_by = scripts_hash()?;
    if path.exists() && fs::read_to_string(&stamp).is_ok_and(|text| text == made_by) {
        return Ok(path);
    }
    fs::create_dir_all(paths::target().join("models"))?;
    let mut command = Command::new(toolchain::python(ui)?);
    command.env("PYTHONDONTWRITEBYTECODE", "1").arg(paths::asset("py/model.py"));
    command.args([value_name(&args.preset), value_name(&args.weights)]).arg(&path);
    for (option, count) in [("--layers", args.layers), ("--experts", args.experts), ("--vocab", args.vocab)] {
        if let Some(count) = count {
            command.arg(option).arg(count.to_string());
        }
    }
    let log = format!("model-{}", file.trim_end_matches(".gguf"));
    Job::new(format!("writing target/models/{file}"), &log, command).percent(script_percent).run(ui)?;
    fs::write(stamp, made_by)?;
    Ok(path)
}

/// Changes when what the scripts write may change.
fn scripts_hash() -> Result<String> {
    let mut hash = Sha256::new();
    for script in ["py/model.py", "py/presets.py", "py/vocab.py"] {
        hash.update(fs::read(paths::asset(script))?);
    }
    Ok(hash.finalize().iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let mut args = ModelArgs::new(Preset::Qwen3, WeightType::Q8_0);
        assert_eq!(args.file_name(), "qwen3-30b-a3b-q8_0.gguf");
        args.layers = Some(2);
        args.vocab = Some(151_936);
        assert_eq!(args.file_name(), "qwen3-30b-a3b-q8_0-l2-v151936.gguf");
    }
}
