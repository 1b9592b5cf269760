//! AMX in software.
