//! The `tollgate` program: reads the command line, runs one command, prints what went wrong.

use std::process::ExitCode;

use mimalloc::MiMalloc;

/// Gives freed tables of counters back, and is quicker than that of the C library.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    tollgate::cli::main()
}
