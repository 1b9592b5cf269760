//! The head of a GGUF file: its keys and its tensors' names, shapes and types. The weights are never read.
//!
//! The layout is ggml's (`ggml/include/gguf.h`): little-endian; magic, version, counts, key/value pairs, tensor infos, and
//! after a gap up to `general.alignment` the data.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ggml_hina::tensor::DType;

/// A value of a key. Arrays are kept as their length alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any integer type.
    Int(i64),
    /// Any floating-point type.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Text.
    Text(String),
    /// Number of elements of an array.
    Array(u64),
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, as `blk.0.ffn_gate_exps.weight`.
    pub name: String,
    /// Elements in each dimension, the innermost first.
    pub ne: Vec<u64>,
    /// ggml's number of the element type (`enum ggml_type`).
    pub kind: u32,
    /// Bytes in the file, with the gap up to the next tensor.
    pub bytes: u64,
}

impl Tensor {
    /// The element type, where the kernels know it.
    pub fn dtype(&self) -> Option<DType> {
        match self.kind {
            0 => Some(DType::F32),
            1 => Some(DType::F16),
            8 => Some(DType::Q8_0),
            30 => Some(DType::Bf16),
            _ => None,
        }
    }

    /// ggml's name of the type.
    pub fn type_name(&self) -> String {
        const NAMES: [&str; 41] = [
            "f32", "f16", "q4_0", "q4_1", "", "", "q5_0", "q5_1", "q8_0", "q8_1", "q2_K", "q3_K", "q4_K", "q5_K",
            "q6_K", "q8_K", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s", "iq4_nl", "iq3_s", "iq2_s", "iq4_xs", "i8", "i16",
            "i32", "i64", "f64", "iq1_m", "bf16", "", "", "", "tq1_0", "tq2_0", "", "", "", "mxfp4", "nvfp4",
        ];
        match NAMES.get(self.kind as usize) {
            Some(name) if !name.is_empty() => (*name).into(),
            _ => format!("type {}", self.kind),
        }
    }
}

/// What the heads of a model's files say.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// The files: one, or all parts of a split model.
    pub files: Vec<PathBuf>,
    /// Keys of the first file.
    pub keys: BTreeMap<String, Value>,
    /// Tensors of all files.
    pub tensors: Vec<Tensor>,
}

impl Model {
    /// Reads the head of `path` and, where it is the first part of a split model, of the other parts.
    ///
    /// # Errors
    /// A sentence that names the file: it is missing, no GGUF, cut off, or a part is missing.
    pub fn read(path: &Path) -> Result<Self> {
        let mut model = Self::default();
        model.add(path)?;
        let parts = model.int("split.count").unwrap_or(1);
        for part in 2..=parts {
            let next = part_name(path, part, parts).with_context(|| {
                format!(
                    "{} has {parts} parts, but its name does not end in '-00001-of-{parts:05}.gguf'",
                    path.display()
                )
            })?;
            model.add(&next)?;
        }
        Ok(model)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path).with_context(|| format!("the model {} cannot be opened", path.display()))?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            bail!("the model {} is not a file: name a .gguf file", path.display());
        }
        let mut head = Head { input: BufReader::new(file), left: meta.len() };
        let (keys, tensors) = match head.parse(meta.len()) {
            Ok(parsed) => parsed,
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => {
                bail!(
                    "the model {} is cut off: its head goes on after the end of the file; bring it again",
                    path.display()
                )
            }
            Err(e) => bail!("the model {} cannot be used: {e}", path.display()),
        };
        if self.files.is_empty() {
            self.keys = keys;
        }
        self.tensors.extend(tensors);
        self.files.push(path.to_owned());
        Ok(())
    }

    /// An integer key.
    pub fn int(&self, key: &str) -> Option<i64> {
        match self.keys.get(key) {
            Some(Value::Int(i)) => Some(*i),
            _ => None,
        }
    }

    /// A text key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.keys.get(key) {
            Some(Value::Text(t)) => Some(t),
            _ => None,
        }
    }

    /// An integer key of the model's architecture, as `expert_count` for `qwen3moe.expert_count`.
    pub fn of_architecture(&self, key: &str) -> Option<i64> {
        self.int(&format!("{}.{key}", self.text("general.architecture")?))
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }
}

/// `llama-gguf-split`'s name of another part: `NAME-00002-of-00003.gguf`.
fn part_name(first: &Path, part: i64, parts: i64) -> Option<PathBuf> {
    let name = first.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-00001-of-{parts:05}.gguf"))?;
    Some(first.with_file_name(format!("{stem}-{part:05}-of-{parts:05}.gguf")))
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.into())
}

/// Reads on from the start of a file; `left` bytes remain, so that no length in the file is believed beyond them.
struct Head<R> {
    input: R,
    left: u64,
}

impl<R: Read + Seek> Head<R> {
    fn parse(&mut self, file_bytes: u64) -> io::Result<(BTreeMap<String, Value>, Vec<Tensor>)> {
        if self.left < 4 || &self.array::<4>()? != b"GGUF" {
            return Err(bad(
                "it is no GGUF file (the first four bytes are not 'GGUF'); llama.cpp's convert_hf_to_gguf.py makes one",
            ));
        }
        let version = self.u32()?;
        if version.swap_bytes() < 1 << 16 {
            return Err(bad("it is a big-endian GGUF file"));
        }
        if !(2..=3).contains(&version) {
            return Err(bad(format!("GGUF version {version} is not known; 2 and 3 are")));
        }
        let (n_tensors, n_keys) = (self.u64()?, self.u64()?);
        let mut keys = BTreeMap::new();
        for _ in 0..n_keys {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind)?;
            keys.insert(key, value);
        }
        // Each tensor's info takes at least 32 bytes.
        if n_tensors > self.left / 32 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let infos = (0..n_tensors).map(|_| self.tensor()).collect::<io::Result<Vec<_>>>()?;
        let align = match keys.get("general.alignment") {
            Some(Value::Int(a)) if *a > 0 => *a as u64,
            _ => 32,
        };
        let data = (file_bytes - self.left).next_multiple_of(align);
        Ok((keys, sizes(infos, file_bytes.saturating_sub(data))?))
    }

    fn tensor(&mut self) -> io::Result<(Tensor, u64)> {
        let name = self.text()?;
        let dims = self.u32()?;
        if dims > 4 {
            return Err(bad(format!("tensor {name} has {dims} dimensions")));
        }
        let ne = (0..dims).map(|_| self.u64()).collect::<io::Result<Vec<_>>>()?;
        let kind = self.u32()?;
        Ok((Tensor { name, ne, kind, bytes: 0 }, self.u64()?))
    }

    fn value(&mut self, kind: u32) -> io::Result<Value> {
        Ok(match kind {
            0 => Value::Int(self.array::<1>()?[0].into()),
            1 => Value::Int(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Int(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Int(self.u32()?.into()),
            5 => Value::Int(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            9 => {
                let (of, n) = (self.u32()?, self.u64()?);
                self.skip_array(of, n)?;
                Value::Array(n)
            }
            10 => Value::Int(self.u64()? as i64),
            11 => Value::Int(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(bad(format!("a key has a type that is not known ({other})"))),
        })
    }

    fn skip_array(&mut self, of: u32, n: u64) -> io::Result<()> {
        let each = match of {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                for _ in 0..n {
                    let bytes = self.u64()?;
                    self.skip(bytes)?;
                }
                return Ok(());
            }
            other => return Err(bad(format!("an array has a type that is not known ({other})"))),
        };
        self.skip(n.checked_mul(each).ok_or(ErrorKind::UnexpectedEof)?)
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.take(bytes)?;
        self.input.seek_relative(bytes as i64)
    }

    fn take(&mut self, bytes: u64) -> io::Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or(ErrorKind::UnexpectedEof)?;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        self.take(N as u64)?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> io::Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> io::Result<String> {
        let len = self.u64()?;
        self.take(len)?;
        let mut bytes = vec![0; len as usize];
        self.input.read_exact(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Sizes from the offsets: each tensor reaches to the next, the last one to the end of the data.
fn sizes(mut infos: Vec<(Tensor, u64)>, data: u64) -> io::Result<Vec<Tensor>> {
    infos.sort_by_key(|(_, offset)| *offset);
    let ends: Vec<u64> = infos.iter().skip(1).map(|(_, offset)| *offset).chain([data]).collect();
    infos
        .into_iter()
        .zip(ends)
        .map(|((mut tensor, offset), end)| {
            tensor.bytes = end.checked_sub(offset).ok_or(ErrorKind::UnexpectedEof)?;
            Ok(tensor)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn text(t: &str) -> Vec<u8> {
        [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat()
    }

    /// Two keys, an array of strings, two tensors of 64 and 32 bytes.
    fn file() -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(2u64.to_le_bytes());
        out.extend(3u64.to_le_bytes());
        out.extend([text("general.architecture"), 8u32.to_le_bytes().into(), text("qwen3moe")].concat());
        out.extend([text("qwen3moe.expert_count"), 4u32.to_le_bytes().into(), 128u32.to_le_bytes().into()].concat());
        out.extend([text("words"), 9u32.to_le_bytes().into(), 8u32.to_le_bytes().into()].concat());
        out.extend([2u64.to_le_bytes().to_vec(), text("a"), text("bcd")].concat());
        for (name, kind, offset) in [("b.weight", 30u32, 64u64), ("a.weight", 0, 0)] {
            out.extend([text(name), 1u32.to_le_bytes().into(), 16u64.to_le_bytes().into()].concat());
            out.extend([&kind.to_le_bytes()[..], &offset.to_le_bytes()].concat());
        }
        out.resize(out.len().next_multiple_of(32) + 96, 0);
        out
    }

    fn parse(bytes: &[u8]) -> io::Result<(BTreeMap<String, Value>, Vec<Tensor>)> {
        let left = bytes.len() as u64;
        Head { input: Cursor::new(bytes), left }.parse(left)
    }

    #[test]
    fn keys_and_tensors() {
        let (keys, tensors) = parse(&file()).unwrap();
        assert_eq!(keys["qwen3moe.expert_count"], Value::Int(128));
        assert_eq!(keys["words"], Value::Array(2));
        let found: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), t.type_name(), t.bytes)).collect();
        assert_eq!(found, [("a.weight", "f32".into(), 64), ("b.weight", "bf16".into(), 32)]);
        assert_eq!(tensors[1].dtype(), Some(DType::Bf16));
    }

    #[test]
    fn every_cut_is_an_error_and_no_length_is_believed() {
        let good = file();
        for len in 0..good.len() - 96 {
            assert!(parse(&good[..len]).is_err(), "cut at {len}");
        }
        let mut huge = good.clone();
        huge[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(parse(&huge).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let mut many = good;
        many[8..16].copy_from_slice(&(1u64 << 60).to_le_bytes());
        assert_eq!(parse(&many).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn other_files_are_named() {
        assert!(parse(b"PK\x03\x04 a zip file").unwrap_err().to_string().contains("no GGUF"));
        let mut old = file();
        old[4] = 1;
        assert!(parse(&old).unwrap_err().to_string().contains("version 1"));
        let missing = Model::read(Path::new("/nonexistent/m.gguf")).unwrap_err();
        assert!(format!("{missing:#}").contains("/nonexistent/m.gguf"));
    }

    #[test]
    fn parts_of_a_split_model() {
        let first = Path::new("/m/x-00001-of-00003.gguf");
        assert_eq!(part_name(first, 2, 3).unwrap(), Path::new("/m/x-00002-of-00003.gguf"));
        assert_eq!(part_name(Path::new("/m/x.gguf"), 2, 3), None);
    }
}
