//! What calls have to bear from the work that a server does beside them: loading rules, forgetting a million keys, writing a
//! snapshot, showing its metrics.
//!
//! Calls come at a steady rate throughout, first undisturbed and then disturbed; that each disturbance took place is checked. The
//! load shares the machine with the server, and so does the disturbance: what `nothing` shows is the machine's own, and where that
//! does not pass, the rest says nothing.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use anyhow::ensure;
use clap::{Args, ValueEnum};
use jiff::Timestamp;
use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::arrivals::{Arrivals, Times};
use crate::generator::Generator;
use crate::report::{Output, Report};
use crate::request::{frame, request};
use crate::server::Server;
use crate::target::Target;
use crate::traffic::{Clients, Frames, RULES, Size, many_rules, value};

/// How long the counters of those keys live that expire, by the clock.
const WINDOW: Duration = Duration::from_secs(20);

/// How many keys are in one call that fills the memory.
const KEYS_PER_CALL: u64 = 100;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Which ones
    #[arg(value_enum, default_values = ["nothing", "reload", "expiry", "snapshot", "scrape"])]
    disturbances: Vec<Disturbance>,
    /// Calls per second
    #[arg(long, default_value_t = 5_000)]
    rate: u32,
    /// Connections
    #[arg(short, default_value_t = 4)]
    connections: usize,
    /// How long each measurement lasts, of which there are two for each disturbance
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(3..=8))]
    seconds: u64,
    #[arg(long, default_value_t = 3)]
    repetitions: u64,
    /// How many keys expire or are in the snapshot
    #[arg(long, default_value_t = 1_000_000)]
    keys: u64,
    /// How many rules there are to load and to show
    #[arg(long, default_value_t = 10_000)]
    rules: u32,
    /// The most that p99.9 may be in milliseconds; Envoy waits for 20 ms unless it is told otherwise
    #[arg(long, default_value_t = 20.0)]
    most: f64,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Disturbance {
    /// Nothing happens: what the machine does by itself
    Nothing,
    /// The rule file is written anew every second and a half
    Reload,
    /// All counters of a rule expire at the same time
    Expiry,
    /// A snapshot every second
    Snapshot,
    /// /metrics is read ten times a second, each rule in it
    Scrape,
}

/// What was measured.
struct Measured {
    before: Times,
    during: Times,
    /// What has happened meanwhile.
    happened: String,
}

pub(crate) fn run(options: &Options, runtime: &Runtime) -> anyhow::Result<()> {
    let columns = [
        &["disturbance", "when"][..],
        &Times::COLUMNS,
        &["verdict", "what happened"],
    ]
    .concat();
    let mut report = Report::new("disturbance", &columns);
    let bench = Bench { options, runtime };
    let mut failed = Vec::new();
    for disturbance in &options.disturbances {
        let name = disturbance.to_possible_value().expect("none is hidden");
        let (mut before, mut during, mut happened) = (Vec::new(), Vec::new(), String::new());
        for _ in 0..options.repetitions {
            let measured = bench.measure(*disturbance)?;
            before.push(measured.before);
            during.push(measured.during);
            happened = measured.happened;
        }
        let verdict = options.verdict(&during);
        add_row(&mut report, &[name.get_name(), "before"], &before, &["", ""]);
        add_row(
            &mut report,
            &[name.get_name(), "during"],
            &during,
            &[verdict, &happened],
        );
        if verdict != "PASS" {
            failed.push(format!("{} {verdict}", name.get_name()));
        }
    }
    report.publish(&options.output)?;
    ensure!(
        failed.is_empty(),
        "p99.9 is over {} ms: {}",
        options.most,
        failed.join(", ")
    );
    Ok(())
}

impl Options {
    /// LATE tells nothing about the server: the calls took too long only because they were sent too late.
    fn verdict(&self, during: &[Times]) -> &'static str {
        let [.., p999, _, once_sent] = Times::row(during).map(|micros| micros <= self.most * 1_000.0);
        match (p999, once_sent) {
            (true, _) => "PASS",
            (false, true) => "LATE",
            (false, false) => "FAIL",
        }
    }
}

fn add_row(report: &mut Report, first: &[&str; 2], times: &[Times], last: &[&str; 2]) {
    let strings = |cells: &[&str; 2]| cells.map(str::to_owned);
    let micros = Times::row(times).map(|micros| format!("{micros:.0}"));
    let cells: Vec<_> = strings(first)
        .into_iter()
        .chain(micros)
        .chain(strings(last))
        .collect();
    eprintln!("{}", cells.join("  "));
    let result = json!({
        "disturbance": first[0],
        "when": first[1],
        "times": Times::json(times),
        "verdict": last[0],
        "happened": last[1],
    });
    report.add(cells, result);
}

struct Bench<'a> {
    options: &'a Options,
    runtime: &'a Runtime,
}

impl Bench<'_> {
    fn measure(&self, disturbance: Disturbance) -> anyhow::Result<Measured> {
        match disturbance {
            Disturbance::Nothing => self.nothing(),
            Disturbance::Reload => self.reload(),
            Disturbance::Expiry => self.expiry(),
            Disturbance::Snapshot => self.snapshot(),
            Disturbance::Scrape => self.scrape(),
        }
    }

    fn nothing(&self) -> anyhow::Result<Measured> {
        let target = Target::tollgate(Server::start(RULES, &[]));
        Ok(Measured {
            before: self.calls(&target, 1)?,
            during: self.calls(&target, 2)?,
            happened: "nothing".to_owned(),
        })
    }

    fn reload(&self) -> anyhow::Result<Measured> {
        let rules = |limit| many_rules(self.options.rules, limit);
        let server = Server::start(&rules(1), &[]);
        let target = Target::tollgate(server);
        let server = target.server();
        let loads = || server.metrics()["ratelimit_service_config_load_success"];
        let before = self.calls(&target, 1)?;
        let loads_before = loads();
        let (during, _) = self.disturbed(&target, |n| {
            server.set_rules(&rules(n + 2));
            thread::sleep(Duration::from_millis(1_500));
        })?;
        let loaded = loads() - loads_before;
        ensure!(loaded >= 1.0, "the server has loaded no rules meanwhile");
        Ok(Measured {
            before,
            during,
            happened: format!("{} rules were loaded {loaded} times", self.options.rules),
        })
    }

    fn expiry(&self) -> anyhow::Result<Measured> {
        let expiring = format!(
            "{RULES}  - {{key: key, rate_limit: {{unit: {}s, requests_per_unit: 100}}}}\n",
            WINDOW.as_secs()
        );
        let target = Target::tollgate(Server::start(&expiring, &[]));
        let counters = || target.server().metrics()["tollgate_counters"] as u64;
        thread::sleep(until_window());
        self.fill(&target)?;
        let before = self.calls(&target, 1)?;
        let filled = counters();
        ensure!(
            filled >= self.options.keys,
            "only {filled} counters are there: a window ended too early"
        );
        thread::sleep(until_window().saturating_sub(Duration::from_millis(200)));
        let during = self.calls(&target, 2)?;
        let left = counters();
        ensure!(
            filled - left >= self.options.keys * 9 / 10,
            "of {filled} counters {left} have not expired"
        );
        Ok(Measured {
            before,
            during,
            happened: format!("{filled} counters became {left}"),
        })
    }

    fn snapshot(&self) -> anyhow::Result<Measured> {
        let rules = format!("{RULES}  - {{key: key, rate_limit: {{unit: year, requests_per_unit: 100}}}}\n");
        let quiet = Target::tollgate(Server::start(&rules, &[]));
        self.fill(&quiet)?;
        let before = self.calls(&quiet, 1)?;
        quiet.end();

        let directory = TempDir::new()?;
        let file = directory.path().join("snapshot");
        let arguments = [
            "--snapshot",
            &file.display().to_string(),
            "--snapshot-period",
            "1s",
        ];
        let target = Target::tollgate(Server::start(&rules, &arguments));
        self.fill(&target)?;
        let mut written = Vec::from_iter(inode(&file));
        let (during, _) = self.disturbed(&target, |_| {
            written.extend(inode(&file));
            written.dedup();
            thread::sleep(Duration::from_millis(10));
        })?;
        let snapshots = written.len().saturating_sub(1);
        ensure!(
            snapshots >= 2,
            "the server has written {snapshots} snapshots meanwhile"
        );
        let size = fs::metadata(&file)?.len() >> 20;
        Ok(Measured {
            before,
            during,
            happened: format!("{snapshots} snapshots of {size} MiB were written"),
        })
    }

    fn scrape(&self) -> anyhow::Result<Measured> {
        let target = Target::tollgate(Server::start(&many_rules(self.options.rules, 1_000_000), &[]));
        // The metrics of a rule are there once it has counted.
        self.runtime.block_on(async {
            let generator = Generator::connect(target.address, 1).await?;
            let calls = u64::from(self.options.rules).div_ceil(KEYS_PER_CALL);
            generator.closed(1, calls, |call| many("rule", call)).await
        })?;
        let before = self.calls(&target, 1)?;
        let mut bytes = 0;
        let (during, scrapes) = self.disturbed(&target, |_| {
            bytes = target.server().get("/metrics").len();
            thread::sleep(Duration::from_millis(100));
        })?;
        let series = target.server().get("/metrics").matches("_total_hits{").count();
        ensure!(
            series >= self.options.rules as usize,
            "only {series} rules have metrics"
        );
        Ok(Measured {
            before,
            during,
            happened: format!("{scrapes} times {} KiB of metrics of {series} rules", bytes >> 10),
        })
    }

    /// Has each key count once.
    fn fill(&self, target: &Target) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            let generator = Generator::connect(target.address, 2).await?;
            let calls = self.options.keys.div_ceil(KEYS_PER_CALL);
            generator.closed(4, calls, |call| many("key", call)).await
        })
    }

    /// Calls for the time of one measurement.
    fn calls(&self, target: &Target, seed: u64) -> anyhow::Result<Times> {
        let arrivals = Arrivals {
            rate: self.options.rate.into(),
            lasting: Duration::from_secs(self.options.seconds),
            seed,
        };
        let before = target.counts();
        let times = self.runtime.block_on(async {
            let generator = Generator::connect(target.address, self.options.connections).await?;
            arrivals
                .send(&generator, Frames::new(Size::Small, Clients::Random(seed)))
                .await
        })?;
        ensure!(
            !times.gave_up,
            "the server cannot take {} calls per second",
            self.options.rate
        );
        target.check(before, times.sent, Size::Small)?;
        Ok(times)
    }

    /// The same while `disturb` is called again and again, with the number of times it was before, which is told at the end.
    fn disturbed(
        &self,
        target: &Target,
        mut disturb: impl FnMut(u32) + Send,
    ) -> anyhow::Result<(Times, u32)> {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let disturber = scope.spawn(|| {
                let mut times = 0;
                while !done.load(Ordering::Relaxed) {
                    disturb(times);
                    times += 1;
                }
                times
            });
            let times = self.calls(target, 2);
            done.store(true, Ordering::Relaxed);
            let disturbances = disturber.join().expect("nobody panics");
            Ok((times?, disturbances))
        })
    }
}

/// The frame of one call for the next so many values of a key.
fn many(key: &'static str, call: u64) -> bytes::Bytes {
    let first = call * KEYS_PER_CALL;
    let values = first..first + KEYS_PER_CALL;
    frame(&request(values.map(|number| vec![(key, value(number))]))).into()
}

/// How long until the window of the keys that expire ends, and the next begins.
fn until_window() -> Duration {
    let window = WINDOW.as_millis() as i64;
    let passed = Timestamp::now().as_millisecond().rem_euclid(window);
    Duration::from_millis((window - passed).unsigned_abs())
}

/// Which file it is: each snapshot is a new one.
fn inode(file: &Path) -> Option<u64> {
    fs::metadata(file).ok().map(|metadata| metadata.ino())
}
