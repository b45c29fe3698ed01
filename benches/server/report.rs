//! What was measured, as a table to read and as JSON, with what one has to know about the machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, thread};

use anyhow::Context as _;
use clap::Args;
use jiff::Timestamp;
use serde_json::{Value, json};

/// Where the figures go besides.
#[derive(Debug, Args)]
pub(crate) struct Output {
    /// Where the figures are written as JSON
    #[arg(long, value_name = "FILE", default_value = "target/bench-server.json")]
    json: PathBuf,
}

/// Figures in rows.
pub(crate) struct Report {
    mode: &'static str,
    setting: Value,
    columns: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    results: Vec<Value>,
}

impl Report {
    /// Takes note of the machine, as it is before the load.
    pub(crate) fn new(mode: &'static str, columns: &[&'static str]) -> Self {
        Report {
            mode,
            setting: setting(),
            columns: columns.to_vec(),
            rows: Vec::new(),
            results: Vec::new(),
        }
    }

    /// Adds what is read and what is written as JSON.
    pub(crate) fn add(&mut self, row: Vec<String>, result: Value) {
        self.rows.push(row);
        self.results.push(result);
    }

    /// Prints the table and writes the files.
    pub(crate) fn publish(self, output: &Output) -> anyhow::Result<()> {
        print!("{}", table(&self.columns, &self.rows));
        println!();
        let load_after = load_average();
        for (name, value) in self.setting.as_object().into_iter().flatten() {
            println!(
                "{name}: {}",
                value.as_str().map_or(value.to_string(), str::to_owned)
            );
        }
        println!("load average after: {load_after}");
        let all = json!({
            "mode": self.mode,
            "setting": self.setting,
            "load average after": load_after,
            "results": self.results,
        });
        write(&output.json, &format!("{all:#}\n"))?;
        Ok(())
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

/// A table in Markdown that can be read as it is.
fn table(columns: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([columns[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns.len()).map(width).collect();
    let line = |cells: &[&str]| {
        let cells = cells.iter().zip(&widths);
        let cells: Vec<_> = cells.map(|(cell, width)| format!("{cell:>width$}")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let rule: Vec<_> = widths.iter().map(|width| "-".repeat(*width)).collect();
    let rule: Vec<_> = rule.iter().map(String::as_str).collect();
    let rows = rows
        .iter()
        .map(|row| line(&row.iter().map(String::as_str).collect::<Vec<_>>()));
    [line(columns), line(&rule)].into_iter().chain(rows).collect()
}

/// The machine, the versions and the command.
fn setting() -> Value {
    let arguments: Vec<_> = env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let cores = thread::available_parallelism().map_or(0, usize::from);
    json!({
        "command": format!("cargo bench --bench server -- {}", arguments.join(" ")),
        "date": Timestamp::now().to_string(),
        "cores": cores,
        "processor": processor(),
        "tollgate": format!("{} {}", env!("CARGO_PKG_VERSION"), said(&["git", "describe", "--always", "--dirty"])),
        "tonic": locked("tonic"),
        "rustc": said(&["rustc", "--version"]),
        "h2load": said(&["h2load", "--version"]),
        "load average before": load_average(),
    })
}

/// The first line of what a command prints; nothing if there is no such command.
fn said(command: &[&str]) -> String {
    let output = Command::new(command[0])
        .args(&command[1..])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let said = output.map_or_else(|_| Vec::new(), |output| output.stdout);
    let said = String::from_utf8_lossy(&said);
    said.lines().next().unwrap_or_default().to_owned()
}

/// The version of a package that was built with.
fn locked(package: &str) -> String {
    let lock = include_str!("../../Cargo.lock");
    let start = format!("name = \"{package}\"\nversion = \"");
    let version = lock
        .split_once(&start)
        .and_then(|(_, rest)| rest.split('"').next());
    version.unwrap_or_default().to_owned()
}

fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name"));
    name.unwrap_or_default()
        .trim_start_matches([' ', '\t', ':'])
        .to_owned()
}

fn load_average() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// All of so many servers, each time another one first.
pub(crate) fn in_turn(servers: usize, repetition: u64) -> impl Iterator<Item = usize> {
    (0..servers).map(move |i| (i + repetition as usize) % servers)
}

/// The middle one, or the upper of the two.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// With two digits behind the point; a dash if there is nothing to show.
pub(crate) fn shown(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.2}"))
}
