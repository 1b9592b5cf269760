//! What is measured: `pp512`, `tg32@d4096`, `tg16x8@p64`, in llama-bench's own words.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Case {
    /// `ppN[@dD]`: a prompt of N tokens, after D tokens that are in the KV cache.
    Prompt {
        /// Tokens of the prompt.
        tokens: u32,
        /// Tokens in the cache before it.
        depth: u32,
    },
    /// `tgN[@dD]`: N tokens generated one by one, after D tokens that are in the KV cache.
    Generate {
        /// Tokens generated.
        tokens: u32,
        /// Tokens in the cache before them.
        depth: u32,
    },
    /// `tgNxS[@pP]`: N tokens for each of S sequences at once, each after a prompt of P tokens (64 if not given).
    Parallel {
        /// Tokens generated for each sequence.
        tokens: u32,
        /// Sequences.
        sequences: u32,
        /// Tokens of each sequence's prompt.
        prompt: u32,
    },
}

/// Prompt tokens of a parallel case that names none.
const PROMPT: u32 = 64;

impl Case {
    /// The program of llama.cpp that measures it.
    pub fn program(self) -> &'static str {
        match self {
            Self::Parallel { .. } => "llama-batched-bench",
            _ => "llama-bench",
        }
    }

    /// The program's arguments, without model and threads.
    pub fn args(self, repeats: u32) -> Vec<String> {
        let args = match self {
            Self::Prompt { tokens, depth } => format!("-p {tokens} -n 0 -d {depth} -r {repeats} -o json"),
            Self::Generate { tokens, depth } => format!("-p 0 -n {tokens} -d {depth} -r {repeats} -o json"),
            Self::Parallel { tokens, sequences, prompt } => {
                // The first repetition maps the weights' pages; the last one counts.
                let list = vec![sequences.to_string(); repeats as usize + 1].join(",");
                let cells = sequences * (tokens + prompt);
                format!("-npp {prompt} -ntg {tokens} -npl {list} -c {cells} --output-format jsonl")
            }
        };
        let mut args: Vec<String> = args.split(' ').map(str::to_owned).collect();
        // Other llama-bench programs (ik_llama.cpp's) have no depth: do not name it where it is 0.
        if let Some(at) = args.windows(2).position(|w| w == ["-d", "0"]) {
            args.drain(at..at + 2);
        }
        args
    }

    /// The same test for a llama-bench that knows no depth but a prompt before it generates, which it does not time
    /// (ik_llama.cpp's `-gp`); none where there is no other way.
    pub fn args_without_depth(self, repeats: u32) -> Option<Vec<String>> {
        let Self::Generate { tokens, depth: depth @ 1.. } = self else { return None };
        let args = format!("-p 0 -n 0 -gp {depth},{tokens} -r {repeats} -o json");
        Some(args.split(' ').map(str::to_owned).collect())
    }

    /// Tokens in the cache before generation begins; none for a case that is no single-sequence generation.
    pub fn generation_depth(self) -> Option<u32> {
        match self {
            Self::Generate { depth, .. } => Some(depth),
            _ => None,
        }
    }

    /// A rough count of the tokens it decodes, prompts as a tenth: what its time is guessed from at first.
    pub fn weight(self) -> u64 {
        let (one_by_one, at_once) = match self {
            Self::Prompt { tokens, depth } => (0, tokens + depth),
            Self::Generate { tokens, depth } => (tokens, depth),
            Self::Parallel { tokens, sequences, prompt } => (tokens, sequences * prompt),
        };
        u64::from(one_by_one) + u64::from(at_once) / 10 + 1
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Prompt { tokens, depth: 0 } => write!(f, "pp{tokens}"),
            Self::Prompt { tokens, depth } => write!(f, "pp{tokens}@d{depth}"),
            Self::Generate { tokens, depth: 0 } => write!(f, "tg{tokens}"),
            Self::Generate { tokens, depth } => write!(f, "tg{tokens}@d{depth}"),
            Self::Parallel { tokens, sequences, prompt } => write!(f, "tg{tokens}x{sequences}@p{prompt}"),
        }
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        parse(s).ok_or_else(|| {
            format!("'{s}' is no test; tests are written as pp512, pp512@d4096, tg32, tg32@d4096, tg16x8 or tg16x8@p64")
        })
    }
}

fn parse(s: &str) -> Option<Case> {
    let number = |t: &str| t.parse::<u32>().ok().filter(|&n| n > 0 && n <= 1 << 24 && !t.starts_with('+'));
    let (head, after) = s.split_once('@').map_or((s, None), |(h, a)| (h, Some(a)));
    let depth = || match after {
        None | Some("d0") => Some(0),
        Some(a) => number(a.strip_prefix('d')?),
    };
    if let Some(n) = head.strip_prefix("pp") {
        return Some(Case::Prompt { tokens: number(n)?, depth: depth()? });
    }
    let n = head.strip_prefix("tg")?;
    let Some((tokens, sequences)) = n.split_once('x') else {
        return Some(Case::Generate { tokens: number(n)?, depth: depth()? });
    };
    let prompt = match after {
        None => PROMPT,
        Some(a) => number(a.strip_prefix('p')?)?,
    };
    let (tokens, sequences) = (number(tokens)?, number(sequences).filter(|&s| s <= 256)?);
    sequences.checked_mul(tokens + prompt)?;
    Some(Case::Parallel { tokens, sequences, prompt })
}

impl TryFrom<String> for Case {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

impl From<Case> for String {
    fn from(case: Case) -> Self {
        case.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_as_read() {
        for text in ["pp512", "pp128@d4096", "tg32", "tg16@d16384", "tg16x8@p64"] {
            assert_eq!(text.parse::<Case>().unwrap().to_string(), text);
        }
        assert_eq!("tg16x8".parse(), Ok(Case::Parallel { tokens: 16, sequences: 8, prompt: 64 }));
        assert_eq!("tg16@d0".parse(), Ok(Case::Generate { tokens: 16, depth: 0 }));
    }

    #[test]
    fn what_is_no_test_says_how_to_write_one() {
        for text in
            ["", "pp", "pp0", "tg-3", "512", "tg16@4096", "tg16x8@d64", "tgx8", "pp+5", "tg1x9999", "pp99999999999"]
        {
            let e = text.parse::<Case>().unwrap_err();
            assert!(e.contains("pp512"), "{text}: {e}");
        }
    }

    #[test]
    fn arguments() {
        let args = |t: &str| t.parse::<Case>().unwrap().args(2).join(" ");
        assert_eq!(args("pp512"), "-p 512 -n 0 -r 2 -o json");
        assert_eq!(args("tg32@d4096"), "-p 0 -n 32 -d 4096 -r 2 -o json");
        let other = |t: &str| t.parse::<Case>().unwrap().args_without_depth(2).map(|args| args.join(" "));
        assert_eq!(other("tg32@d4096").as_deref(), Some("-p 0 -n 0 -gp 4096,32 -r 2 -o json"));
        assert_eq!([other("tg32"), other("pp32@d64"), other("tg16x8")], [None, None, None]);
        assert_eq!(args("tg16x8@p64"), "-npp 64 -ntg 16 -npl 8,8,8 -c 640 --output-format jsonl");
    }
}
