//! The `tollgate` program: reads the command line, runs one command, prints what went wrong.

use std::process::ExitCode;

fn main() -> ExitCode {
    tollgate::cli::main()
}
