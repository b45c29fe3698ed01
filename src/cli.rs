//! The command line: every flag, the environment variable behind it, and the commands.

mod control_group;
mod effective;
mod server_settings;
mod settings;
mod stats_settings;
mod tracing_settings;
mod values;
mod without_effect;
mod xds_settings;

use std::env;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, BufReader, IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::error::{ContextKind, ContextValue};
use clap::{ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use futures_util::stream::StreamExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::warn;

use self::server_settings::ServerSettings;
use self::settings::{
    DecisionSettings, LogSettings, MemorySettings, ObserverSettings, RuleFileSettings, RuleSettings,
};
use self::xds_settings::XdsSettings;
use crate::build;
use crate::clock::Clock;
use crate::config::file::Loaded;
use crate::config::{Listen, LoadError, RulesConfig, RulesSource, ServerConfig, SnapshotConfig, nearest};
use crate::health::Health;
use crate::limiter::{Limiter, LimiterConfig};
use crate::matcher::Domain;
use crate::rate_limit::Charge;
use crate::reload::Reloader;
use crate::replay::{Replay, Reply};
use crate::rule::{Level, Rule};
use crate::server::{Parts, RulesFrom, Server, observers};
use crate::shutdown::Signals;
use crate::store::snapshot::{Snapshot, SnapshotError, SnapshotFile};
use crate::xds::{XdsClient, XdsConfig};

/// The exit code of a command line that cannot be used.
const USAGE: u8 = 2;

/// A rate-limit decision server for Envoy.
///
/// Without a command it serves.
#[derive(Debug, Parser)]
#[command(version = build::VERSION_AND_REVISION, override_usage = "tollgate [COMMAND] [OPTIONS]")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve decisions over gRPC (the default)
    Serve(Box<Serve>),
    /// Print what each setting of the server comes to, and where that was said
    Env(Box<Serve>),
    /// Check rule files: print every error and warning
    Check(Check),
    /// Run recorded requests against rules, on a clock that follows the recording
    Replay(ReplayCommand),
}

#[derive(Debug, Args)]
struct Serve {
    #[command(flatten)]
    rules: RuleSettings,
    #[command(flatten)]
    xds: XdsSettings,
    #[command(flatten)]
    decisions: DecisionSettings,
    #[command(flatten)]
    memory: MemorySettings,
    #[command(flatten)]
    observers: ObserverSettings,
    #[command(flatten)]
    server: ServerSettings,
    #[command(flatten)]
    log: LogSettings,
}

#[derive(Debug, Args)]
struct Check {
    /// Rule files, and directories of them; together they must make one set of rules
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    /// Print one line per rule
    #[arg(long)]
    print: bool,
    #[command(flatten)]
    files: RuleFileSettings,
}

/// One line in: {"time": 1700000000.5, "request": {...}}, the request in proto3 JSON.
///
/// One line out: {"time": ..., "response": {...}} or {"time": ..., "error": {"code": ..., "message": ...}}. A byte that is
/// not UTF-8 is written \xHH in a request's domain, key or value.
#[derive(Debug, Args)]
struct ReplayCommand {
    /// The rules: a file, or a directory of files (repeatable)
    #[arg(long = "config", value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    /// The recorded requests, one JSON object per line; - reads them from standard input
    #[arg(long, value_name = "FILE")]
    requests: PathBuf,
    /// Add to each line by how much the statistics of the rules grew
    #[arg(long, conflicts_with = "summary")]
    metrics: bool,
    /// Print a table of the rules instead of the answers: calls, refused calls, the most hits in one window
    #[arg(long)]
    summary: bool,
    #[command(flatten)]
    files: RuleFileSettings,
    #[command(flatten)]
    decisions: DecisionSettings,
}

/// Runs the program.
pub fn main() -> ExitCode {
    let (cli, matches) = match parse(env::args_os().collect()) {
        Ok(parsed) => parsed,
        Err(error) => {
            // Nobody to tell if it cannot be printed.
            let _ = error.print();
            return if error.use_stderr() {
                ExitCode::from(USAGE)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    let done = match cli.command {
        Command::Serve(serve) => serve.run(),
        Command::Env(serve) => print_settings(&matches).and_then(|code| serve.to_configs().map(|_| code)),
        Command::Check(check) => check.run(),
        Command::Replay(replay) => replay.run(),
    };
    match done {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            tell(format_args!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Says something on stderr. Nobody to tell if that is closed or full.
fn tell(message: impl Display) {
    let _ = writeln!(io::stderr(), "{message}");
}

/// Lets the process have as many connections as it may. Shells and service managers often start with 1024 for the sake of
/// old programs.
fn raise_limit_of_connections() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // The limit that there is will have to do.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Whoever read our output has seen enough.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Reads the command line; what it does not say comes from the environment.
fn parse(mut arguments: Vec<OsString>) -> Result<(Cli, ArgMatches), clap::Error> {
    let help = ["-h", "--help", "-V", "--version"];
    // Manifests for envoyproxy/ratelimit give its path as the command, or as an argument; it takes no others.
    if arguments
        .get(1)
        .is_some_and(|argument| Path::new(argument).ends_with("ratelimit"))
    {
        arguments.remove(1);
    }
    let first = arguments.get(1).and_then(|argument| argument.to_str());
    if first.is_none_or(|first| first.starts_with('-') && !help.contains(&first)) {
        arguments.insert(1.min(arguments.len()), "serve".into());
    }
    let mut command = Cli::command();
    let asks_for_help = arguments
        .iter()
        .any(|argument| help.iter().any(|help| argument == help));
    if !asks_for_help {
        refuse_unknown_variables(&mut command)?;
    }
    command = command.mut_subcommands(|command| command.mut_args(without_empty_variable));
    let matches = command
        .try_get_matches_from_mut(arguments)
        .map_err(|error| name_variable(error, &command))?;
    let cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    Ok((cli, matches))
}

/// A variable that is empty is as good as unset where empty means nothing: manifests pass on what they were not given. Those
/// of envoyproxy/ratelimit for which it means something keep it.
fn without_empty_variable(argument: clap::Arg) -> clap::Arg {
    const EMPTY_IS_UNSET: [&str; 3] = [
        "RUNTIME_ROOT",
        "RUNTIME_SUBDIRECTORY",
        "TRACING_EXPORTER_PROTOCOL",
    ];
    let is_unset = argument.get_env().is_some_and(|variable| {
        let name = variable.to_string_lossy();
        let may_be = name.starts_with("TOLLGATE_") || EMPTY_IS_UNSET.contains(&&*name);
        may_be && env::var_os(variable).is_some_and(|value| value.is_empty())
    });
    if is_unset {
        argument.env(None::<&str>)
    } else {
        argument
    }
}

/// `matches` are of a command line that names a command.
fn print_settings(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command();
    // Completes what the derivation leaves for later.
    command.build();
    let (name, matches) = matches.subcommand().context("there is no command")?;
    let command = command
        .find_subcommand(name)
        .context("there is no such command")?;
    effective::print(command, matches)?;
    Ok(ExitCode::SUCCESS)
}

/// Adds to the message about a bad value which environment variable it came from.
fn name_variable(mut error: clap::Error, command: &clap::Command) -> clap::Error {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let flag = flag.split(['=', ' ', '[']).next().unwrap_or_default().to_owned();
    let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else {
        return error;
    };
    let variable = command
        .get_subcommands()
        .flat_map(clap::Command::get_arguments)
        .find(|argument| {
            argument
                .get_long()
                .is_some_and(|long| flag == format!("--{long}"))
        })
        .and_then(|argument| argument.get_env())
        .filter(|variable| env::var_os(variable).is_some_and(|set| set.to_string_lossy() == *value))
        .map(|variable| variable.to_string_lossy().into_owned());
    if let Some(variable) = variable {
        let source = format!("{flag} <environment variable {variable}>");
        error.insert(ContextKind::InvalidArg, ContextValue::String(source));
    }
    error
}

/// A misspelt variable of ours would silently leave a default in force.
fn refuse_unknown_variables(command: &mut clap::Command) -> Result<(), clap::Error> {
    let known: Vec<String> = command
        .get_subcommands()
        .flat_map(clap::Command::get_arguments)
        .filter_map(|argument| Some(argument.get_env()?.to_string_lossy().into_owned()))
        .collect();
    for (name, value) in env::vars_os() {
        let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
        let Some(bare) = name.strip_prefix("TOLLGATE_") else {
            continue;
        };
        if known.iter().any(|known| *known == name) || values::is_injected_by_kubernetes(&name, &value) {
            continue;
        }
        let meant = known
            .iter()
            .map(String::as_str)
            .find(|known| *known == bare)
            .or_else(|| nearest(&name, known.iter().map(String::as_str)));
        let advice = match meant {
            Some(meant) => format!("did you mean {meant}?"),
            None => "see tollgate serve --help".to_owned(),
        };
        let message = format!("unknown environment variable {name}; {advice}");
        return Err(command.error(clap::error::ErrorKind::UnknownArgument, message));
    }
    Ok(())
}

/// Reads the rules. Prints what is odd about them.
fn load(rules: &RulesConfig) -> Result<Loaded, LoadError> {
    let loaded = rules.load();
    let warnings: Vec<_> = match &loaded {
        Ok(loaded) => loaded.diagnostics.warnings().collect(),
        Err(error) => error.warnings().collect(),
    };
    for warning in warnings {
        tell(warning);
    }
    let loaded = loaded?;
    if loaded.matcher.domains().next().is_none() {
        tell("warning: there are no rule files");
    }
    Ok(loaded)
}

/// Reads the rules, and watches them from before that on, so that no change is missed.
fn watched_and_loaded(rules: &RulesConfig) -> (Reloader, Result<Loaded, LoadError>) {
    /// After so many attempts it is left to the watch to notice that files have changed.
    const MOST_ATTEMPTS: usize = 5;
    let mut attempts = 1;
    loop {
        let reloader = Reloader::new(rules.clone());
        let loaded = load(rules);
        if reloader.is_current() || attempts == MOST_ATTEMPTS {
            return (reloader, loaded);
        }
        attempts += 1;
    }
}

// === impl Serve ===

impl Serve {
    fn run(self) -> anyhow::Result<ExitCode> {
        let _guard = self.log.init();
        raise_limit_of_connections();
        let ignored = without_effect::set().join(", ");
        if !ignored.is_empty() {
            warn!(
                variables = ignored,
                "environment variables without effect: {ignored}"
            );
        }
        let (config, xds) = self.to_configs()?;
        match xds {
            Some(xds) => self.run_with_xds(config, xds),
            None => self.run_with_files(config),
        }
    }

    /// The settings of the server, and of the xDS server if rules come from one. Fails if they do not fit together.
    fn to_configs(&self) -> anyhow::Result<(ServerConfig, Option<XdsConfig>)> {
        let server = self.server.to_config().map_err(anyhow::Error::msg)?;
        let xds = self.xds.to_config(self.rules.merge_domains());
        Ok((server, xds.map_err(anyhow::Error::msg)?))
    }

    fn run_with_files(self, config: ServerConfig) -> anyhow::Result<ExitCode> {
        let rules = self.rules.to_config();
        let (reloader, loaded) = watched_and_loaded(&rules);
        let loaded = match loaded {
            Ok(loaded) => Ok(loaded),
            Err(fault) if self.rules.must_load(&rules) => {
                // The same words as those of `check`.
                tell(fault);
                return Ok(ExitCode::FAILURE);
            }
            Err(fault) => Err(fault),
        };
        let parts = Parts {
            rules: Some(RulesFrom::Files(reloader)),
            ..self.parts(&config)?
        };
        run(async {
            let signals = Signals::listen().context("cannot listen for signals")?;
            let in_force = parts.in_force();
            let server = bind(config, parts).await?;
            match loaded {
                Ok(loaded) => in_force.put(loaded),
                Err(fault) => in_force.refuse(&fault),
            }
            if matches!(rules.source, RulesSource::Example) {
                tell(example_hint(&server));
            }
            anyhow::Ok(server.run(signals.into_stream()).await?)
        })
    }

    fn run_with_xds(self, config: ServerConfig, xds: XdsConfig) -> anyhow::Result<ExitCode> {
        let parts = self.parts(&config)?;
        run(async {
            let signals = Signals::listen().context("cannot listen for signals")?;
            let mut stops = Box::pin(signals.into_stream());
            let mut client = XdsClient::new(xds, parts.in_force());
            if !self.rules.may_start_without() {
                tokio::select! {
                    () = client.wait_for_rules() => {}
                    _ = stops.next() => return Ok(()),
                }
            }
            let parts = Parts {
                rules: Some(RulesFrom::Xds(Box::new(client))),
                ..parts
            };
            let server = bind(config, parts).await?;
            anyhow::Ok(server.run(stops).await?)
        })
    }

    /// All parts, with the counters of the last snapshot if there is one, and without rules.
    fn parts(&self, config: &ServerConfig) -> anyhow::Result<Parts> {
        let limiter_config = LimiterConfig {
            memory: self.memory.to_config(),
            ..self.decisions.to_config()
        };
        let events = self.observers.events(limiter_config.near_limit_ratio);
        let top = self.observers.top();
        let (limiter, clock) = resume(limiter_config, config.snapshot.as_ref())?;
        let limiter = limiter.observed_by(observers(events.as_ref(), top.as_ref()));
        Ok(Parts {
            metrics: self.observers.metrics(),
            events,
            top,
            health: Health::new(self.server.needs_rules()),
            ..Parts::new(Arc::new(limiter), Arc::new(clock))
        })
    }
}

/// Runs the server to its end.
fn run(serve: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(serve)?;
    // Connections that outlasted the grace time do not hold up the end.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Opens the ports, and says where they are.
async fn bind(config: ServerConfig, parts: Parts) -> anyhow::Result<Server> {
    let (grpc, room) = (config.grpc.listen.clone(), parts.limiter.store().capacity());
    let server = Server::bind(config, parts).await?;
    tell_of_ports(&server, &grpc);
    warn!(counters = room, "there is room for {room} counters");
    Ok(server)
}

fn tell_of_ports(server: &Server, grpc: &Listen) {
    let grpc = server
        .grpc_address()
        .map_or_else(|| grpc.to_string(), |address| address.to_string());
    warn!(grpc, "listening for gRPC on {grpc}");
    let others = [
        ("HTTP", server.http_address()),
        ("debugging", server.debug_address()),
        ("Prometheus", server.prometheus_address()),
    ];
    for (what, address) in others {
        if let Some(address) = address {
            warn!(%address, "listening for {what} on {address}");
        }
    }
}

/// A limiter and a clock, which go on where the last snapshot ends.
fn resume(config: LimiterConfig, snapshot: Option<&SnapshotConfig>) -> anyhow::Result<(Limiter, Clock)> {
    let Some(SnapshotConfig { path, .. }) = snapshot else {
        return Ok((Limiter::new(config), Clock::system()));
    };
    let (limiter, clock) = match last_snapshot(path)? {
        Some(snapshot) => {
            let clock = Clock::system_after(snapshot.monotonic_at(Clock::system().now()));
            let limiter = Limiter::resume(config, &snapshot, clock.now());
            (limiter.context("cannot read the snapshot")?, clock)
        }
        None => (Limiter::new(config), Clock::system()),
    };
    // Better now than at the end, when the counts would be lost.
    limiter
        .write_snapshot(&SnapshotFile::new(path.clone()), clock.now())
        .with_context(|| format!("cannot write the snapshot {}", path.display()))?;
    let resumed = limiter.store().len();
    if resumed > 0 {
        warn!(
            counters = resumed,
            "going on with {resumed} counters of the snapshot"
        );
    }
    Ok((limiter, clock))
}

/// The snapshot to go on with. One that is of no use is moved aside, and the counts start from zero.
fn last_snapshot(path: &Path) -> anyhow::Result<Option<Snapshot>> {
    let file = SnapshotFile::new(path.to_owned());
    let path = path.display();
    let error = match file.read() {
        Ok(snapshot) => return Ok(snapshot),
        Err(error @ SnapshotError::Unreadable(_)) => bail!("cannot read the snapshot {path}: {error}"),
        Err(error) => error,
    };
    let aside = file
        .set_aside()
        .with_context(|| format!("cannot move {path} aside, of which {error}"))?;
    let aside = aside.display();
    warn!(%error, "cannot go on with {path}: {error}; it is kept as {aside}, and counts start from zero");
    Ok(None)
}

fn example_hint(server: &Server) -> String {
    let port = |address: Option<SocketAddr>| address.map_or(0, |address| address.port());
    let (http, grpc) = (port(server.http_address()), port(server.grpc_address()));
    format!(
        r#"
No rules were given, so tollgate runs on an embedded example: 3 requests per minute for each user.
Try it; the first three calls of a minute answer OK, the others OVER_LIMIT:

  for i in 1 2 3 4 5; do curl -s http://127.0.0.1:{http}/json -d '{{"domain": "example", "descriptors": [{{"entries": [{{"key": "user", "value": "alice"}}]}}]}}'; echo; done

or, over gRPC:

  grpcurl -plaintext -d '{{"domain": "example", "descriptors": [{{"entries": [{{"key": "user", "value": "alice"}}]}}]}}' 127.0.0.1:{grpc} envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit

Give it your own rules with --config FILE-OR-DIRECTORY.
"#
    )
}

// === impl Check ===

impl Check {
    fn run(self) -> anyhow::Result<ExitCode> {
        let rules = self.files.to_config(RulesSource::Paths(self.paths));
        let Some(loaded) = load(&rules).map_err(tell).ok() else {
            return Ok(ExitCode::FAILURE);
        };
        let mut out = io::stdout().lock();
        let mut domains: Vec<_> = loaded.matcher.domains().collect();
        domains.sort_by_key(|domain| domain.name());
        if self.print {
            for domain in &domains {
                for line in domain_lines(domain) {
                    writeln!(out, "{line}")?;
                }
                for rule in domain.rules() {
                    writeln!(out, "{}", rule_line(domain.name(), rule))?;
                }
            }
        }
        let count = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        writeln!(
            out,
            "ok: {}, {}",
            count(domains.len(), "domain"),
            count(loaded.matcher.rules(), "rule")
        )?;
        Ok(ExitCode::SUCCESS)
    }
}

/// What `--print` shows of a domain besides its rules.
fn domain_lines(domain: &Domain) -> Vec<String> {
    let name = domain.name();
    let charge = domain
        .charge()
        .filter(|charge| *charge == Charge::AllOrNothing)
        .map(|_| format!("{name}: charge all_or_nothing"));
    let mut addresses: Vec<String> = domain
        .client_address_keys()
        .map(|key| format!("{name}: client_address {}", String::from_utf8_lossy(key)))
        .collect();
    addresses.sort();
    charge.into_iter().chain(addresses).collect()
}

/// One rule as `--print` shows it.
fn rule_line(domain: &str, rule: &Rule) -> String {
    let mut line = domain.to_owned();
    for level in rule.levels.iter() {
        let equals = if level.pattern.is_empty() { "" } else { "=" };
        line.push_str(&format!(" > {}{equals}{}", level.key, level.pattern));
    }
    line.push_str(&format!(": {}", rule.limit));
    for limit in rule.limits().iter().filter(|limit| !limit.name.is_empty()) {
        line.push_str(&format!(", name {}", limit.name));
    }
    if !rule.replaces.is_empty() {
        line.push_str(&format!(", replaces {}", rule.replaces.join(" ")));
    }
    let any = |flag: fn(&Level) -> bool| rule.levels.iter().any(flag);
    let flags = [
        ("shadow_mode", rule.shadow_mode),
        ("quota_mode", rule.quota_mode),
        ("detailed_metric", rule.detailed_metric),
        ("share_threshold", any(|level| level.share_threshold)),
        ("value_to_metric", any(|level| level.value_to_metric)),
        ("metadata", rule.metadata.is_some()),
    ];
    for (flag, _) in flags.iter().filter(|(_, set)| *set) {
        line.push_str(", ");
        line.push_str(flag);
    }
    line
}

// === impl ReplayCommand ===

impl ReplayCommand {
    fn run(self) -> anyhow::Result<ExitCode> {
        let rules = self.files.to_config(RulesSource::Paths(self.paths));
        let Some(loaded) = load(&rules).map_err(tell).ok() else {
            return Ok(ExitCode::FAILURE);
        };
        let limiter = Limiter::new(self.decisions.to_config());
        limiter.set_matcher(loaded.matcher);
        let reply = match (self.summary, self.metrics) {
            (true, _) => Reply::Summary,
            (false, true) => Reply::ResponsesWithMetrics,
            (false, false) => Reply::Responses,
        };
        let mut replay = Replay::new(limiter, reply, io::BufWriter::new(io::stdout().lock()));

        let from_stdin = self.requests.as_os_str() == "-";
        let progress = progress_bar(&self.requests);
        let unread = if from_stdin {
            replay.run(progress.wrap_read(io::stdin().lock()))
        } else {
            let cannot = |what: &str| format!("cannot {what} {}", self.requests.display());
            let file = File::open(&self.requests).with_context(|| cannot("open"))?;
            if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
                bail!("{}: it is a directory", cannot("read"));
            }
            replay.run(BufReader::with_capacity(1 << 16, progress.wrap_read(file)))
        }?;
        progress.finish_and_clear();
        if unread.count() == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        for line in unread.shown() {
            tell(format_args!("{}:{line}", self.requests.display()));
        }
        let lines = if unread.count() == 1 { "line" } else { "lines" };
        bail!(
            "{} {lines} of {} could not be read",
            unread.count(),
            self.requests.display()
        );
    }
}

/// Shows on a terminal how far the recording is read, unless the answers go there as well.
fn progress_bar(requests: &Path) -> ProgressBar {
    if io::stdout().is_terminal() {
        return ProgressBar::hidden();
    }
    let length = fs::metadata(requests).ok().filter(|metadata| metadata.is_file());
    match length {
        Some(metadata) => ProgressBar::new(metadata.len()).with_style(
            ProgressStyle::with_template("{wide_bar} {percent}% {binary_bytes_per_sec} {eta} left")
                .expect("the template is valid"),
        ),
        None => ProgressBar::new_spinner(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn without_a_command_it_serves() {
        #[track_caller]
        fn test(arguments: &[&str], serves: bool) {
            let (cli, _) =
                parse(arguments.iter().map(OsString::from).collect()).expect("it is a valid command line");
            assert_eq!(matches!(cli.command, Command::Serve(_)), serves, "{arguments:?}");
        }
        test(&["tollgate"], true);
        test(&["tollgate", "--grpc-port", "0"], true);
        test(&["tollgate", "serve", "--grpc-port", "0"], true);
        test(&["tollgate", "check", "rules.yaml"], false);
    }

    #[test]
    fn connections_live_for_a_day_and_with_an_age_of_0_for_ever() {
        #[track_caller]
        fn test(arguments: &[&str], expected: Option<Duration>) {
            let arguments = [&["tollgate"], arguments].concat();
            let (cli, _) =
                parse(arguments.iter().map(OsString::from).collect()).expect("it is a valid command line");
            let Command::Serve(serve) = cli.command else {
                panic!("it serves");
            };
            let age = serve.server.to_config().unwrap().grpc.max_connection_age;
            assert_eq!(age.map(|age| age.most), expected, "{arguments:?}");
        }
        test(&[], Some(Duration::from_secs(24 * 3_600)));
        test(&["--grpc-max-connection-age", "2s"], Some(Duration::from_secs(2)));
        test(&["--grpc-max-connection-age", "0"], None);
        test(&["--grpc-max-connection-age", "0s"], None);
    }
}
