//! The task that sends what is counted to statsd.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{debug, warn};

use super::ServerError;
use crate::config::{Protocol, StatsdConfig};
use crate::http::Shown;
use crate::metrics::statsd::{Lines, Told};
use crate::shutdown;

/// How long sending may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// The most bytes of a UDP packet: what fits into one of Ethernet.
const PACKET: usize = 1_432;

/// Sends until everything is to close, and then once more.
pub(super) async fn run(
    config: StatsdConfig,
    shown: Shown,
    closed: watch::Receiver<bool>,
) -> Result<(), ServerError> {
    let mut sender = Sender {
        host: config.host,
        port: config.port,
        protocol: config.protocol,
        stream: None,
    };
    let mut ticks = interval(config.flush_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is at once.
    ticks.tick().await;
    let mut closed = pin!(shutdown::closed(closed));
    let (mut told, mut is_failing) = (Arc::new(Told::default()), false);
    loop {
        let ends = tokio::select! {
            () = &mut closed => true,
            _ = ticks.tick() => false,
        };
        let (lines, next) = lines(&config.lines, &shown, Arc::clone(&told)).await;
        let sent = timeout(PATIENCE, sender.send(&lines)).await;
        match sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(()) => {
                // What has not arrived is told the next time.
                told = Arc::new(next);
                is_failing = false;
            }
            Err(error) => {
                sender.stream = None;
                if config.is_asked_for && !is_failing {
                    warn!(%error, "cannot send to statsd, trying again: {error}");
                } else {
                    debug!(%error, "cannot send to statsd: {error}");
                }
                is_failing = true;
            }
        }
        if ends {
            return Ok(());
        }
    }
}

async fn lines(lines: &Lines, shown: &Shown, told: Arc<Told>) -> (Vec<String>, Told) {
    let (lines, shown) = (lines.clone(), shown.clone());
    // With many rules it takes a while; decisions are not to wait for it.
    spawn_blocking(move || {
        let samples = shown.metrics.samples(&shown.limiter, shown.events.as_deref());
        lines.since(&told, samples)
    })
    .await
    .expect("lines are made without panic")
}

struct Sender {
    host: String,
    port: u16,
    protocol: Protocol,
    /// The last connection that worked.
    stream: Option<TcpStream>,
}

impl Sender {
    async fn send(&mut self, lines: &[String]) -> io::Result<()> {
        match self.protocol {
            Protocol::Tcp => self.send_stream(lines).await,
            Protocol::Udp => self.send_packets(lines).await,
        }
    }

    async fn send_stream(&mut self, lines: &[String]) -> io::Result<()> {
        // Kept only if all of it goes well.
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => TcpStream::connect((self.host.as_str(), self.port)).await?,
        };
        stream.write_all((lines.join("\n") + "\n").as_bytes()).await?;
        self.stream = Some(stream);
        Ok(())
    }

    async fn send_packets(&self, lines: &[String]) -> io::Result<()> {
        let mut addresses = tokio::net::lookup_host((self.host.as_str(), self.port)).await?;
        let address = addresses
            .next()
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).await?;
        socket.connect(address).await?;
        let mut packet = String::new();
        for line in lines {
            if !packet.is_empty() && packet.len() + 1 + line.len() > PACKET {
                socket.send(packet.as_bytes()).await?;
                packet.clear();
            }
            if !packet.is_empty() {
                packet.push('\n');
            }
            packet.push_str(line);
        }
        if !packet.is_empty() {
            socket.send(packet.as_bytes()).await?;
        }
        Ok(())
    }
}
