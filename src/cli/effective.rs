//! `tollgate env`: what each setting comes to, and where that was said.

use std::io::{self, Write as _};

use clap::ArgMatches;
use clap::parser::ValueSource;

/// Variables whose values are nobody's business.
const SECRET: [&str; 1] = ["CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS"];

/// Prints a line for each setting: variable, value and origin.
pub(super) fn print(command: &clap::Command, matches: &ArgMatches) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for argument in command.get_arguments() {
        let Some(variable) = argument.get_env() else {
            continue;
        };
        let variable = variable.to_string_lossy();
        let id = argument.get_id().as_str();
        let values = matches.get_raw(id).into_iter().flatten();
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        let value = values.join(",");
        let is_secret = SECRET.contains(&&*variable) && !value.is_empty();
        let shown = if is_secret { "***" } else { &value };
        let flag = argument.get_long().unwrap_or_default();
        let origin = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => format!("--{flag}"),
            Some(ValueSource::EnvVariable) => "environment".to_owned(),
            _ => "default".to_owned(),
        };
        writeln!(out, "{variable}={shown}\t# {origin}")?;
    }
    Ok(())
}
