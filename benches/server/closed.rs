//! The closed loop: what a call costs, and how many there are in a second when the next is sent as soon as one is answered.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::generator::Generator;
use crate::h2load::h2load;
use crate::report::{Output, Report, in_turn, median, shown};
use crate::target::{Others, Target};
use crate::traffic::{CLIENTS, Clients, Frames, Size};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Connections
    #[arg(short, default_values_t = [1, 10, 50])]
    connections: Vec<usize>,
    /// Calls under way on each connection
    #[arg(short = 'm', default_values_t = [1, 10, 100])]
    streams: Vec<usize>,
    #[arg(long, value_enum, default_values = ["small", "big"])]
    size: Vec<Size>,
    /// How many calls are measured each time, after a tenth as many that are not
    #[arg(long, default_value_t = 30_000)]
    calls: u64,
    #[arg(long, default_value_t = 3)]
    repetitions: u64,
    #[arg(long, value_enum, default_value = "h2load")]
    load: Load,
    #[command(flatten)]
    others: Others,
    #[command(flatten)]
    output: Output,
}

/// Who calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Load {
    /// h2load: cheap, but each of its runs is all of one client, a different one each time
    H2load,
    /// This program: each call is of any of the 100,000 clients, but it takes more CPU time than most servers
    Own,
}

impl Load {
    fn name(self) -> &'static str {
        match self {
            Load::H2load => "h2load",
            Load::Own => "own",
        }
    }
}

/// One way in which all servers are called.
#[derive(Debug, Clone, Copy)]
struct Cell {
    size: Size,
    connections: usize,
    streams: usize,
}

/// What one server is sent at a time.
#[derive(Debug, Clone, Copy)]
struct Run {
    cell: Cell,
    load: Load,
    calls: u64,
    /// Says which clients call.
    seed: u64,
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// In microseconds.
    cpu_per_call: Option<f64>,
    calls_per_second: f64,
}

pub(crate) fn run(options: &Options, runtime: &Runtime) -> anyhow::Result<()> {
    let targets = Target::all(&options.others)?;
    let mut report = Report::new(
        "closed",
        &[
            "size",
            "c",
            "m",
            "server",
            "CPU us/call",
            "ratio",
            "calls/s",
            "ratio",
        ],
    );
    for size in &options.size {
        for target in targets.iter().filter(|target| target.decides()) {
            meet_clients(target, *size, runtime)?;
        }
        for connections in &options.connections {
            for streams in &options.streams {
                let cell = Cell {
                    size: *size,
                    connections: *connections,
                    streams: *streams,
                };
                measure_cell(cell, &targets, options, runtime, &mut report)?;
            }
        }
    }
    report.publish(&options.output)
}

/// Has each client call once, so that there is a counter for each.
pub(crate) fn meet_clients(target: &Target, size: Size, runtime: &Runtime) -> anyhow::Result<()> {
    let before = target.counts();
    runtime.block_on(async {
        let generator = Generator::connect(target.address, 4).await?;
        let frames = Frames::new(size, Clients::InTurn);
        generator
            .closed(100, CLIENTS, move |call| frames.frame(call))
            .await
    })?;
    target.check(before, CLIENTS, size)
}

fn measure_cell(
    cell: Cell,
    targets: &[Target],
    options: &Options,
    runtime: &Runtime,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut samples = vec![Vec::new(); targets.len()];
    for repetition in 0..options.repetitions {
        for i in in_turn(targets.len(), repetition) {
            let run = |calls: u64| Run {
                cell,
                load: options.load,
                calls: calls.max((cell.connections * cell.streams) as u64), // what can be under way
                seed: repetition,
            };
            run(options.calls / 10).measure(&targets[i], runtime)?;
            samples[i].push(run(options.calls).measure(&targets[i], runtime)?);
        }
    }
    let cpu = |samples: &[Sample]| {
        let cpu: Option<Vec<_>> = samples.iter().map(|sample| sample.cpu_per_call).collect();
        cpu.map(median)
    };
    let rate = |samples: &[Sample]| median(samples.iter().map(|sample| sample.calls_per_second));
    let (base_cpu, base_rate) = (cpu(&samples[0]), rate(&samples[0]));
    for (target, samples) in targets.iter().zip(&samples) {
        let (cpu, rate) = (cpu(samples), rate(samples));
        let cpu_ratio = cpu.zip(base_cpu).map(|(cpu, base)| cpu / base);
        let row = vec![
            cell.size.name().to_owned(),
            cell.connections.to_string(),
            cell.streams.to_string(),
            target.name.clone(),
            shown(cpu),
            shown(cpu_ratio),
            format!("{rate:.0}"),
            format!("{:.2}", rate / base_rate),
        ];
        eprintln!("{}", row.join("  "));
        let result = json!({
            "size": cell.size.name(),
            "connections": cell.connections,
            "streams": cell.streams,
            "server": target.name,
            "load": options.load.name(),
            "calls": options.calls,
            "cpu_us_per_call": cpu,
            "cpu_ratio": cpu_ratio,
            "calls_per_second": rate,
            "cpu_us_per_call_of_each": samples.iter().map(|sample| sample.cpu_per_call).collect::<Vec<_>>(),
            "calls_per_second_of_each": samples.iter().map(|sample| sample.calls_per_second).collect::<Vec<_>>(),
        });
        report.add(row, result);
    }
    Ok(())
}

impl Run {
    fn measure(self, target: &Target, runtime: &Runtime) -> anyhow::Result<Sample> {
        let before = target.counts();
        let cpu = target.cpu_time();
        let calls_per_second = match self.load {
            Load::H2load => self.by_h2load(target)?,
            Load::Own => runtime.block_on(self.by_ourselves(target))?,
        };
        let cpu = target.cpu_time().zip(cpu).map(|(after, before)| after - before);
        target.check(before, self.calls, self.cell.size)?;
        Ok(Sample {
            cpu_per_call: cpu.map(|cpu| cpu.as_secs_f64() * 1e6 / self.calls as f64),
            calls_per_second,
        })
    }

    /// The calls per second.
    fn by_h2load(self, target: &Target) -> anyhow::Result<f64> {
        let Cell {
            size,
            connections,
            streams,
        } = self.cell;
        let request = size.request(Clients::Random(self.seed).client(0));
        let amount = ["-n", &self.calls.to_string()];
        let said = h2load(target.address, connections, streams, amount, &request);
        let all = format!("{} succeeded, 0 failed, 0 errored, 0 timeout", self.calls);
        ensure!(said.contains(&all), "not all calls were answered:\n{said}");
        let rate = said
            .split_once(" req/s")
            .and_then(|(before, _)| before.rsplit(' ').next());
        Ok(rate.context("h2load tells no rate")?.parse()?)
    }

    /// The calls per second.
    async fn by_ourselves(self, target: &Target) -> anyhow::Result<f64> {
        let generator = Generator::connect(target.address, self.cell.connections).await?;
        let frames = Frames::new(self.cell.size, Clients::Random(self.seed));
        let start = Instant::now();
        generator
            .closed(self.cell.streams, self.calls, move |call| frames.frame(call))
            .await?;
        Ok(self.calls as f64 / start.elapsed().as_secs_f64())
    }
}
