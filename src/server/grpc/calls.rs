//! The calls of one connection.
//!
//! The task of the connection answers them itself: it takes in all calls that have come, decides on them, and then lets the
//! connection write all their answers at once. A task for each call, and a write for each answer, would cost several times
//! what the decisions do. Other methods than the one that decides go to tonic's routes, each in a task of its own.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use h2::server::{Connection, SendResponse};
use h2::{PingPong, RecvStream};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response};
use opentelemetry::Context as SpanContext;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::service::Routes;
use tonic::{Code, Status};

use super::admission::Admission;
use super::arriving::{Arriving, FRAME_HEADER, NoRequest, Received};
use super::routed;
use crate::clock::{Clock, Timestamp};
use crate::metrics::Metrics;
use crate::rls::Rls;
use crate::rls::deadline::Deadline;
use crate::spans::{CallSpan, Spans};

/// The method that decides.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// How many calls are taken in before they are answered.
const MOST_AT_ONCE: usize = 128;

/// How much room is made for answers at a time, in bytes.
const ANSWERS: usize = 4_096;

/// What answers the calls of all connections.
pub(in crate::server) struct Services {
    pub(in crate::server) rls: Rls,
    /// Health and reflection.
    pub(in crate::server) routes: Routes,
    pub(in crate::server) clock: Arc<Clock>,
    pub(in crate::server) metrics: Arc<Metrics>,
    pub(in crate::server) admission: Arc<Admission>,
    /// Sends spans, if somebody wants them.
    pub(in crate::server) spans: Option<Arc<Spans>>,
    pub(in crate::server) closed: watch::Receiver<bool>,
}

/// A connection, which is ready when it has ended.
pub(super) struct Calls<S> {
    connection: Connection<S, Bytes>,
    services: Arc<Services>,
    /// Those whose requests are not complete.
    arriving: FuturesUnordered<ArrivingCall>,
    /// Those that are to be answered now.
    complete: Vec<(Call, Result<Bytes, Status>)>,
    /// Those of other methods.
    routed: JoinSet<()>,
    /// Where answers are written. They are sent from there, a piece each.
    answers: BytesMut,
}

/// A call that wants a decision.
struct Call {
    respond: SendResponse<Bytes>,
    deadline: Option<Deadline>,
    /// Where its caller is, if spans are sent.
    caller: Option<Box<SpanContext>>,
}

/// A call whose request is not complete.
struct ArrivingCall {
    /// Until it is complete.
    call: Option<Call>,
    request: Arriving,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Calls<S> {
    pub(super) fn new(connection: Connection<S, Bytes>, services: Arc<Services>) -> Self {
        Calls {
            connection,
            services,
            arriving: FuturesUnordered::new(),
            complete: Vec::new(),
            routed: JoinSet::new(),
            answers: BytesMut::new(),
        }
    }

    /// Lets the client know that it is to make no further calls here. Ends when those under way have been answered.
    pub(super) fn graceful_shutdown(&mut self) {
        self.connection.graceful_shutdown();
    }

    /// What tells whether the client is still there. To be taken once.
    pub(super) fn ping_pong(&mut self) -> Option<PingPong> {
        self.connection.ping_pong()
    }

    /// Takes in calls. Ready if there are too many for now, or with `true` if the connection has ended.
    fn poll_calls(&mut self, context: &mut Context<'_>, now: &mut Now<'_>) -> Poll<bool> {
        for _ in 0..MOST_AT_ONCE {
            let Some(Ok((request, respond))) = ready!(self.connection.poll_accept(context)) else {
                return Poll::Ready(true);
            };
            self.take_in(request, respond, context, now);
        }
        Poll::Ready(false)
    }

    fn take_in(
        &mut self,
        request: Request<RecvStream>,
        respond: SendResponse<Bytes>,
        context: &mut Context<'_>,
        now: &mut Now<'_>,
    ) {
        if request.uri().path() != SHOULD_RATE_LIMIT {
            self.route(request, respond);
            return;
        }
        let (head, body) = request.into_parts();
        let deadline = head
            .headers
            .get("grpc-timeout")
            .and_then(|timeout| Deadline::new(timeout.to_str().ok()?, now.get()));
        let caller = self
            .services
            .spans
            .as_ref()
            .map(|_| Box::new(Spans::caller(&head.headers)));
        let call = Call {
            respond,
            deadline,
            caller,
        };
        let mut received = Received::new(body);
        match received.poll_message(context) {
            Poll::Ready(Ok(request)) => self.complete.push((call, Ok(request))),
            Poll::Ready(Err(NoRequest::Refused(status))) => self.complete.push((call, Err(status))),
            Poll::Ready(Err(NoRequest::Gone)) => {}
            Poll::Pending => match self.services.admission.admit() {
                Ok(admitted) => self.arriving.push(ArrivingCall {
                    call: Some(call),
                    request: Arriving::new(received, admitted),
                }),
                Err(status) => self.complete.push((call, Err(status))),
            },
        }
    }

    /// Has a call of another method answered. It is admitted here: a task of which a client makes thousands, and takes them back,
    /// may be long in coming to run.
    fn route(&mut self, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
        match self.services.admission.admit() {
            Ok(admitted) => {
                let services = Arc::clone(&self.services);
                self.routed
                    .spawn(routed::answer(request, respond, admitted, services));
            }
            Err(status) => {
                // Whoever has gone away meanwhile does not get it.
                let _ = refuse(respond, &status);
            }
        }
    }

    /// Answers the calls that are complete.
    fn answer(&mut self, now: Timestamp) {
        let services = &*self.services;
        let mut start = now.monotonic;
        for (call, request) in self.complete.drain(..) {
            let answer = match &request {
                Ok(_) if call.deadline.is_some_and(|deadline| deadline.has_passed(now)) => Err(
                    Status::deadline_exceeded("the deadline passed before the decision; nothing was charged"),
                ),
                Ok(request) => answer(&services.rls, request, now, &mut self.answers),
                Err(status) => Err(status.clone()),
            };
            let code = answer.as_ref().map_or_else(Status::code, |_| Code::Ok);
            // Whoever has gone away meanwhile does not get it.
            let _ = match answer {
                Ok(answer) => send(call.respond, answer),
                Err(status) => refuse(call.respond, &status),
            };
            let end = services.clock.monotonic();
            services.metrics.note_call(end.saturating_sub(start));
            if let (Some(spans), Some(caller)) = (&services.spans, &call.caller) {
                spans.send(&CallSpan {
                    caller,
                    request: request.ok().as_deref(),
                    code,
                    start: now.wall_time_at(start),
                    end: now.wall_time_at(end),
                });
            }
            start = end;
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Future for Calls<S> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let services = Arc::clone(&this.services);
        loop {
            // First: what reads before may leave no budget for it, and tasks that have ended would pile up.
            while let Poll::Ready(Some(_)) = this.routed.poll_join_next(context) {}
            let mut now = Now::new(&services.clock);
            let polled = this.poll_calls(context, &mut now);
            while let Poll::Ready(Some(arrived)) = this.arriving.poll_next_unpin(context) {
                this.complete.extend(arrived);
            }
            if polled == Poll::Ready(true) {
                return Poll::Ready(());
            }
            if this.complete.is_empty() {
                if polled.is_pending() {
                    return Poll::Pending;
                }
                continue;
            }
            this.answer(now.get());
            // Once more, so that the connection writes the answers.
        }
    }
}

/// The answer as it is framed by gRPC.
fn answer(rls: &Rls, request: &[u8], now: Timestamp, answers: &mut BytesMut) -> Result<Bytes, Status> {
    if answers.capacity() - answers.len() < ANSWERS / 16 {
        answers.reserve(ANSWERS);
    }
    answers.extend_from_slice(&[0; FRAME_HEADER]);
    if let Err(error) = rls.answer(request, now, answers) {
        answers.clear();
        return Err(error.into());
    }
    let length = u32::try_from(answers.len() - FRAME_HEADER).expect("an answer is not that long");
    answers[1..FRAME_HEADER].copy_from_slice(&length.to_be_bytes());
    Ok(answers.split().freeze())
}

fn send(mut respond: SendResponse<Bytes>, answer: Bytes) -> Result<(), h2::Error> {
    let mut stream = respond.send_response(head(), false)?;
    stream.send_data(answer, false)?;
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    stream.send_trailers(trailers)
}

/// Answers with an error.
pub(super) fn refuse(mut respond: SendResponse<Bytes>, status: &Status) -> Result<(), h2::Error> {
    let mut head = head();
    if status.add_header(head.headers_mut()).is_err() {
        // Its text cannot be in a header.
        let code = HeaderValue::from(status.code() as u16);
        head.headers_mut().insert(Status::GRPC_STATUS, code);
    }
    respond.send_response(head, true).map(drop)
}

fn head() -> Response<()> {
    let mut head = Response::new(());
    head.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    head
}

impl Future for ArrivingCall {
    /// `None` if the call is gone.
    type Output = Option<(Call, Result<Bytes, Status>)>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let request = match ready!(self.request.poll_message(context)) {
            Ok(request) => Ok(request),
            Err(NoRequest::Refused(status)) => Err(status),
            Err(NoRequest::Gone) => return Poll::Ready(None),
        };
        let call = self.call.take();
        Poll::Ready(call.map(|call| (call, request)))
    }
}

/// The time, read once, and only if somebody asks.
struct Now<'a> {
    clock: &'a Clock,
    read: Option<Timestamp>,
}

impl<'a> Now<'a> {
    fn new(clock: &'a Clock) -> Self {
        Now { clock, read: None }
    }

    fn get(&mut self) -> Timestamp {
        *self.read.get_or_insert_with(|| self.clock.now())
    }
}
