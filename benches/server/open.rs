//! The open loop: how long a call takes at a given rate, for all servers at the same one. Where a server cannot keep up there are no
//! figures.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::runtime::Runtime;

use crate::arrivals::{Arrivals, Times};
use crate::generator::Generator;
use crate::report::{Output, Report, in_turn, median, shown};
use crate::target::{Others, Target};
use crate::traffic::{Clients, Frames, Size};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Calls per second
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 5_000, 10_000, 20_000, 40_000])]
    rate: Vec<u32>,
    /// Connections
    #[arg(short, default_value_t = 4)]
    connections: usize,
    #[arg(long, value_enum, default_value = "small")]
    size: Size,
    /// How long each measurement lasts
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    #[arg(long, default_value_t = 3)]
    repetitions: u64,
    #[command(flatten)]
    others: Others,
    #[command(flatten)]
    output: Output,
}

pub(crate) fn run(options: &Options, runtime: &Runtime) -> anyhow::Result<()> {
    let targets = Target::all(&options.others)?;
    for target in targets.iter().filter(|target| target.decides()) {
        crate::closed::meet_clients(target, options.size, runtime)?;
    }
    let columns = [
        &["rate", "server"][..],
        &Times::COLUMNS,
        &["p50 ratio", "p99 ratio", "CPU us/call"],
    ]
    .concat();
    let mut report = Report::new("open", &columns);
    for rate in &options.rate {
        measure_rate(*rate, &targets, options, runtime, &mut report)?;
    }
    report.publish(&options.output)
}

fn measure_rate(
    rate: u32,
    targets: &[Target],
    options: &Options,
    runtime: &Runtime,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut of_targets: Vec<_> = targets.iter().map(|_| (Vec::new(), Vec::new())).collect();
    for repetition in 0..options.repetitions {
        let arrivals = Arrivals {
            rate: rate.into(),
            lasting: Duration::from_secs(options.seconds),
            seed: repetition,
        };
        for i in in_turn(targets.len(), repetition) {
            let (target, (times, cpu)) = (&targets[i], &mut of_targets[i]);
            let before = (target.counts(), target.cpu_time());
            let measured = runtime.block_on(async {
                let generator = Generator::connect(target.address, options.connections).await?;
                let frames = Frames::new(options.size, Clients::Random(repetition));
                arrivals.send(&generator, frames).await
            })?;
            if let Some((after, before)) = target.cpu_time().zip(before.1) {
                cpu.push((after - before).as_secs_f64() * 1e6 / measured.sent as f64);
            }
            target.check(before.0, measured.sent, options.size)?;
            times.push(measured);
        }
    }
    let gave_up = |times: &[Times]| times.iter().any(|times| times.gave_up);
    let (base, base_gave_up) = (Times::row(&of_targets[0].0), gave_up(&of_targets[0].0));
    for (target, (times, cpu)) in targets.iter().zip(of_targets) {
        let row = Times::row(&times);
        let cpu = (!cpu.is_empty()).then(|| median(cpu));
        let gave_up = gave_up(&times);
        let mut cells = vec![rate.to_string(), target.name.clone()];
        // What was not measured to the end is no figure.
        let is_figure = |figure: bool, text: String| if figure { text } else { "-".to_owned() };
        cells.extend(row.map(|micros| is_figure(!gave_up, format!("{micros:.0}"))));
        let ratios = [row[0] / base[0], row[1] / base[1]];
        cells.extend(ratios.map(|ratio| is_figure(!gave_up && !base_gave_up, format!("{ratio:.2}"))));
        cells.push(shown(cpu));
        eprintln!("{}", cells.join("  "));
        let result = json!({
            "rate": rate,
            "size": options.size.name(),
            "connections": options.connections,
            "server": target.name,
            "gave_up": gave_up,
            "times": Times::json(&times),
            "cpu_us_per_call": cpu,
        });
        report.add(cells, result);
    }
    Ok(())
}
