//! How long it takes from when the process is made until it takes connections.

use anyhow::ensure;
use clap::Args;
use serde_json::json;

use crate::report::{Output, Report, median};
use crate::server::Server;
use crate::traffic::many_rules;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How many rules there are besides those that the server has itself
    #[arg(long, default_values_t = [10, 10_000, 100_000])]
    rules: Vec<u32>,
    #[arg(long, default_value_t = 11)]
    repetitions: usize,
    #[command(flatten)]
    output: Output,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    ensure!(options.repetitions > 0, "nothing is measured");
    let mut report = Report::new("start", &["rules", "listening after, ms", "at most, ms"]);
    let mut add = |name: String, start: &dyn Fn() -> Server| {
        let times: Vec<f64> = (0..options.repetitions)
            .map(|_| start().startup_time.as_secs_f64() * 1e3)
            .collect();
        let most = times.iter().copied().fold(0.0, f64::max);
        let result = json!({"rules": name, "ms": times});
        let median = median(times);
        report.add(vec![name, format!("{median:.1}"), format!("{most:.1}")], result);
    };
    add("its own".to_owned(), &Server::start_with_own_rules);
    for rules in &options.rules {
        let text = many_rules(*rules, 1_000_000);
        add(rules.to_string(), &|| Server::start(&text, &[]));
    }
    report.publish(&options.output)
}
