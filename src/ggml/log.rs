//! Lines to ggml's log, which a program may show, redirect or silence (`ggml_log_set`).

use std::ffi::CString;

use super::sys;

fn line(level: sys::ggml_log_level, text: &str) {
    let text = CString::new(format!("HiNa: {}\n", text.replace('\0', " "))).unwrap_or_default();
    // SAFETY: a NUL-terminated string that lives through the call.
    unsafe { sys::ggml_hina_log(level, text.as_ptr()) }
}

/// Something the user may want to know.
pub fn info(text: &str) {
    line(sys::GGML_LOG_LEVEL_INFO, text);
}

/// Something is not as asked, and what is done instead.
pub fn warn(text: &str) {
    line(sys::GGML_LOG_LEVEL_WARN, text);
}

/// Something failed.
pub fn error(text: &str) {
    line(sys::GGML_LOG_LEVEL_ERROR, text);
}
