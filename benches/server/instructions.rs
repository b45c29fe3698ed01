//! How many instructions a call takes in user mode, counted by callgrind: a figure that hardly moves with the machine.
//!
//! The server runs with one worker thread on a processor that valgrind emulates; what the kernel does is not counted. h2load calls
//! over one connection, ten calls at a time, all of one client, so that caches of keys and headers are as warm as they can be.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::json;
use tempfile::TempDir;

use crate::h2load::h2load;
use crate::report::{Output, Report};
use crate::server::Server;
use crate::target::{Baseline, Target};
use crate::traffic::{RULES, Size};

/// What was found at last, a name and a number a line.
const KNOWN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions.txt");

/// The most that tollgate may take, as a multiple of what is known.
const MOST: f64 = 1.05;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Fail if tollgate takes over 5 % more than is known; the baseline is not run
    #[arg(long, conflicts_with = "write")]
    check: bool,
    /// Keep what is found in benches/instructions.txt
    #[arg(long)]
    write: bool,
    #[command(flatten)]
    output: Output,
}

/// A server that callgrind can run.
#[derive(Debug, Clone)]
enum Program {
    Tollgate,
    Baseline(PathBuf),
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let known = fs::read_to_string(KNOWN).unwrap_or_default();
    let of_baseline = |size: Size| number(&known, &name("baseline", size));
    let baseline = if options.check {
        None
    } else {
        Some(Program::Baseline(Baseline::build()?))
    };
    let mut report = Report::new(
        "instructions",
        &["size", "server", "instructions/call", "ratio", "known", "change"],
    );
    let (mut found, mut grown) = (String::new(), Vec::new());
    for size in [Size::Small, Size::Big] {
        let mut base = of_baseline(size);
        for program in baseline.iter().chain([&Program::Tollgate]) {
            let instructions = program.instructions_per_call(size)?;
            let name = name(program.name(), size);
            let known = number(&known, &name);
            let change = known.map(|known| instructions as f64 / known as f64);
            match program {
                Program::Baseline(_) => base = Some(instructions),
                Program::Tollgate if change.is_some_and(|change| change > MOST) => grown.push(name.clone()),
                Program::Tollgate => {}
            }
            let ratio = base.map(|base| instructions as f64 / base as f64);
            found += &format!("{name} {instructions}\n");
            let row = vec![
                size.name().to_owned(),
                program.name().to_owned(),
                instructions.to_string(),
                ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
                known.map_or("-".to_owned(), |known| known.to_string()),
                change.map_or("-".to_owned(), |change| {
                    format!("{:+.1} %", (change - 1.0) * 100.0)
                }),
            ];
            eprintln!("{}", row.join("  "));
            let result = json!({
                "size": size.name(),
                "server": program.name(),
                "instructions_per_call": instructions,
                "ratio": ratio,
            });
            report.add(row, result);
        }
    }
    report.publish(&options.output)?;
    if options.write {
        fs::write(KNOWN, found)?;
    }
    if options.check {
        ensure!(!known.is_empty(), "nothing is known: run it with --write");
        ensure!(
            grown.is_empty(),
            "over 5 % more than is known: {}",
            grown.join(", ")
        );
    }
    Ok(())
}

fn name(server: &str, size: Size) -> String {
    format!("{server}.{}", size.name())
}

/// What stands behind a name.
fn number(known: &str, name: &str) -> Option<u64> {
    let mut lines = known.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(of, _)| *of == name)?.1.parse().ok()
}

impl Program {
    fn name(&self) -> &'static str {
        match self {
            Program::Tollgate => "tollgate",
            Program::Baseline(_) => "baseline",
        }
    }

    /// Two runs, so that what start and end take does not count.
    fn instructions_per_call(&self, size: Size) -> anyhow::Result<u64> {
        const FEW: u64 = 1_000;
        const MANY: u64 = 11_000;
        let few = self.instructions(size, FEW)?;
        let many = self.instructions(size, MANY)?;
        ensure!(many > few, "{MANY} calls took no more instructions than {FEW}");
        Ok((many - few) / (MANY - FEW))
    }

    /// Those of a process that answers so many calls.
    fn instructions(&self, size: Size, calls: u64) -> anyhow::Result<u64> {
        let directory = TempDir::new()?;
        let counted = directory.path().join("callgrind.out");
        let target = self.start(&counted)?;
        let before = target.counts();
        h2load(
            target.address,
            1,
            10,
            ["-n", &calls.to_string()],
            &size.request(1),
        );
        target.check(before, calls, size)?;
        target.end();
        let counted = fs::read_to_string(counted)?;
        let total = counted.lines().find_map(|line| line.strip_prefix("totals: "));
        Ok(total.context("callgrind tells no total")?.trim().parse()?)
    }

    fn start(&self, counted: &Path) -> anyhow::Result<Target> {
        let mut valgrind = Command::new("valgrind");
        valgrind
            .args(["--tool=callgrind", "--log-file=/dev/null"])
            .arg(format!("--callgrind-out-file={}", counted.display()))
            .env("TOKIO_WORKER_THREADS", "1");
        Ok(match self {
            Program::Tollgate => {
                valgrind.arg(Server::PROGRAM);
                Target::tollgate(Server::start_by(valgrind, RULES, &[]))
            }
            Program::Baseline(program) => {
                valgrind.arg(program);
                Target::baseline(Baseline::start_by(valgrind)?)
            }
        })
    }
}
