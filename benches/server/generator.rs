//! Load of our own, by the `h2` crate on one thread: calls of many clients, as fast as they are answered or at a given rate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use bytes::{Bytes, BytesMut};
use h2::client::SendRequest;
use http::{HeaderMap, Method, Request, Version};
use prost::Message as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;

use crate::request::PATH;

/// Open connections to one server.
pub(crate) struct Generator {
    connections: Vec<Connection>,
}

impl Generator {
    pub(crate) async fn connect(address: SocketAddr, connections: usize) -> anyhow::Result<Self> {
        let mut open = Vec::new();
        for _ in 0..connections {
            open.push(Connection::open(address).await?);
        }
        Ok(Generator { connections: open })
    }

    /// That on which one call is made, counted from 0.
    pub(crate) fn connection(&self, call: u64) -> Connection {
        self.connections[call as usize % self.connections.len()].clone()
    }

    /// A closed loop: so many calls, of which `streams` are under way on each connection. Fails unless all are answered OK.
    pub(crate) async fn closed(
        &self,
        streams: usize,
        calls: u64,
        frame: impl Fn(u64) -> Bytes + Send + Sync + 'static,
    ) -> anyhow::Result<()> {
        let (next, frame) = (Arc::new(AtomicU64::new(0)), Arc::new(frame));
        let mut loops = JoinSet::new();
        for connection in &self.connections {
            for _ in 0..streams {
                let (next, frame, connection) = (Arc::clone(&next), Arc::clone(&frame), connection.clone());
                loops.spawn(async move {
                    loop {
                        let call = next.fetch_add(1, Ordering::Relaxed);
                        if call >= calls {
                            return anyhow::Ok(());
                        }
                        connection.clone().call(frame(call)).await?;
                    }
                });
            }
        }
        while let Some(done) = loops.join_next().await {
            done??;
        }
        Ok(())
    }
}

/// One connection, on which calls are made at the same time.
#[derive(Clone)]
pub(crate) struct Connection {
    streams: SendRequest<Bytes>,
    head: Request<()>,
}

impl Connection {
    async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (streams, connection) = h2::client::Builder::new()
            // Answers wait for no window.
            .initial_window_size(1 << 20)
            .initial_connection_window_size(1 << 24)
            .handshake(stream)
            .await?;
        tokio::spawn(connection);
        let head = Request::builder()
            .method(Method::POST)
            .version(Version::HTTP_2)
            .uri(format!("http://{address}{PATH}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())?;
        Ok(Connection { streams, head })
    }

    /// One call, which ends with its message as those of gRPC clients do. Fails unless it is answered OK.
    pub(crate) async fn call(self, frame: Bytes) -> anyhow::Result<()> {
        let mut streams = self.streams.ready().await?;
        let (answer, mut stream) = streams.send_request(self.head, false)?;
        stream.send_data(frame, true)?;
        let (head, mut body) = answer.await?.into_parts();
        let mut message = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data?;
            body.flow_control().release_capacity(data.len())?;
            message.extend_from_slice(&data);
        }
        let trailers = body.trailers().await?;
        let status = grpc_status(&head.headers).or(trailers.as_ref().and_then(grpc_status));
        ensure!(status == Some(b"0"), "the call failed: {status:?}");
        let message = message.get(5..).context("the answer has no message")?;
        let answer = RateLimitResponse::decode(message)?;
        ensure!(answer.overall_code == Code::Ok as i32, "the call was refused");
        Ok(())
    }
}

fn grpc_status(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get("grpc-status").map(|status| status.as_bytes())
}
