//! ggml's declarations, bound from the user's own headers by `build.rs`.
#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    dead_code,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    improper_ctypes,
    unnecessary_transmutes,
    unsafe_op_in_unsafe_fn
)]

include!(concat!(env!("OUT_DIR"), "/ggml.rs"));

// SAFETY: the signatures are those of `ggml-backend/glue.c`.
unsafe extern "C" {
    /// `ggml-backend/glue.c`: hands one finished line to ggml's log.
    pub fn ggml_hina_log(level: ggml_log_level, line: *const ::std::os::raw::c_char);
    /// `ggml-backend/glue.c`: how many nodes use the result of node `i`.
    pub fn ggml_hina_use_count(graph: *const ggml_cgraph, i: ::std::os::raw::c_int) -> ::std::os::raw::c_int;
}
