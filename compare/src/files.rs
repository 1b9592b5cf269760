//! Files that are whole or not there: written beside their place, then renamed.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// Writes `bytes` to `path`; a crash or a full disk leaves the old file.
///
/// # Errors
/// A sentence that names the file.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(name);
    let written = fs::File::create(&part)
        .and_then(|mut f| f.write_all(bytes.as_ref()).and_then(|()| f.sync_data()))
        .and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written.with_context(|| format!("{} cannot be written", path.display()))
}

/// Makes the folder and proves that it can be written to; `otherwise` says what to do if not.
///
/// # Errors
/// A sentence that names the folder and the way out.
pub fn writable_dir(dir: &Path, otherwise: &str) -> Result<()> {
    let probe = dir.join(format!(".probe.{}", std::process::id()));
    fs::create_dir_all(dir)
        .and_then(|()| fs::write(&probe, b""))
        .and_then(|()| fs::remove_file(&probe))
        .with_context(|| format!("nothing can be written to {}; {otherwise}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_or_not_at_all() {
        let dir = std::env::temp_dir().join(format!("hina-compare-files-{}", std::process::id()));
        writable_dir(&dir, "--out").unwrap();
        let file = dir.join("a.json");
        write(&file, "one").unwrap();
        write(&file, "two").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "two");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        // The place is taken by a folder: the write fails and leaves nothing behind.
        fs::create_dir(dir.join("b.json")).unwrap();
        let e = write(&dir.join("b.json"), "x").unwrap_err();
        assert!(e.to_string().contains("b.json cannot be written"), "{e}");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2);
        assert!(writable_dir(&file.join("below"), "--out").unwrap_err().to_string().contains("--out"));
        fs::remove_dir_all(dir).unwrap();
    }
}
