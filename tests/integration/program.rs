//! The program as a process.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The program with nothing in its environment.
pub(crate) fn tollgate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.env_clear().args(arguments).stdin(Stdio::null());
    command
}

/// A server started as a user would, and the lines that it prints.
pub(crate) struct Served {
    child: Child,
    lines: Option<std::io::Lines<BufReader<std::process::ChildStderr>>>,
}

impl Served {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Served::start_with(arguments, &[])
    }

    pub(crate) fn start_with(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let ports = [
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--grpc-host",
            "127.0.0.1",
            "--grpc-port",
            "0",
        ];
        let mut command = tollgate(&[arguments, &ports].concat());
        command.envs(environment.iter().copied());
        let mut child = command
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program can be started");
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Served {
            child,
            lines: Some(lines),
        }
    }

    /// The next line that holds `part`.
    pub(crate) fn line_with(&mut self, part: &str) -> String {
        self.lines
            .as_mut()
            .expect("the log is still read")
            .map(Result::unwrap)
            .find(|line| line.contains(part))
            .unwrap_or_else(|| panic!("it never printed {part}"))
    }

    /// Where it listens for this, once it does.
    pub(crate) fn address_of(&mut self, what: &str) -> SocketAddr {
        let listening = format!("listening for {what} on ");
        let line = self.line_with(&listening);
        let address = line.split(&listening).nth(1).unwrap();
        address.split('"').next().unwrap().parse().unwrap()
    }

    /// The lines up to the next one that holds `part`, without that one.
    pub(crate) fn lines_before(&mut self, part: &str) -> Vec<String> {
        let mut before = Vec::new();
        for line in self.lines.as_mut().expect("the log is still read") {
            let line = line.unwrap();
            if line.contains(part) {
                return before;
            }
            before.push(line);
        }
        panic!("it never printed {part}, but {before:?}")
    }

    /// From now on what it prints goes nowhere.
    pub(crate) fn stop_reading(&mut self) {
        self.lines = None;
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(pid, signal).unwrap();
    }

    pub(crate) fn exit_code(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}
