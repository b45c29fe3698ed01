//! A request on its way: the parts of its body, until the message is complete.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use tokio::time::{Sleep, sleep};
use tonic::Status;

use super::admission::Admitted;

/// How long a caller may take to send its request.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// The largest message, in bytes: what other gRPC servers take as well.
const LARGEST_MESSAGE: usize = 4 << 20;

/// What stands before a message: whether it is compressed, and its length.
pub(super) const FRAME_HEADER: usize = 5;

/// What has come of a request so far.
#[derive(Debug)]
pub(super) struct Received {
    body: RecvStream,
    bytes: Bytes,
}

/// Why there is no request.
#[derive(Debug)]
pub(super) enum NoRequest {
    /// The client took the call back, or the connection broke.
    Gone,
    /// It is refused.
    Refused(Status),
}

impl Received {
    pub(super) fn new(body: RecvStream) -> Self {
        Received {
            body,
            bytes: Bytes::new(),
        }
    }

    /// Takes in what has come. Ready with the message once that is complete.
    pub(super) fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes, NoRequest>> {
        while let Some(part) = ready!(self.poll_part(context)?) {
            self.push(part);
            self.check_length()?;
        }
        Poll::Ready(self.message())
    }

    /// The next part of the body. `None` at its end.
    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, NoRequest>> {
        if self.body.is_end_stream() {
            return Poll::Ready(Ok(None));
        }
        let Some(part) = ready!(self.body.poll_data(context)) else {
            return Poll::Ready(Ok(None));
        };
        let part = part.map_err(|_| NoRequest::Gone)?;
        // It has been taken from the connection, so the client may send as much again.
        let released = self.body.flow_control().release_capacity(part.len());
        released.map_err(|_| NoRequest::Gone)?;
        Poll::Ready(Ok(Some(part)))
    }

    fn push(&mut self, part: Bytes) {
        if self.bytes.is_empty() {
            self.bytes = part;
        } else if !part.is_empty() {
            let mut joined = BytesMut::from(std::mem::take(&mut self.bytes));
            joined.extend_from_slice(&part);
            self.bytes = joined.freeze();
        }
    }

    /// The length that the message says it has, once that is known.
    fn declared_length(&self) -> Option<usize> {
        let (_, rest) = self.bytes.split_first()?;
        Some(u32::from_be_bytes(*rest.first_chunk()?) as usize)
    }

    fn check_length(&self) -> Result<(), NoRequest> {
        let Some(length) = self.declared_length() else {
            return Ok(());
        };
        let refusal = if length > LARGEST_MESSAGE {
            Status::resource_exhausted(format!("a request may have {LARGEST_MESSAGE} bytes"))
        } else if self.bytes.len() > FRAME_HEADER + length {
            Status::internal("a request is one message")
        } else {
            return Ok(());
        };
        Err(NoRequest::Refused(refusal))
    }

    fn message(&mut self) -> Result<Bytes, NoRequest> {
        let refused = |status| Err(NoRequest::Refused(status));
        let arrived = self.bytes.len().saturating_sub(FRAME_HEADER);
        if self.declared_length() != Some(arrived) {
            return refused(Status::internal("the request ends before its message does"));
        }
        match self.bytes.first() {
            Some(0) => Ok(self.bytes.split_off(FRAME_HEADER)),
            Some(1) => refused(Status::unimplemented("compressed requests are not understood")),
            _ => refused(Status::internal("the request has no valid message")),
        }
    }
}

/// A request that is waited for, as long as there is patience and room for it.
pub(super) struct Arriving {
    pub(super) received: Received,
    admitted: Admitted,
    /// How much has been counted.
    counted: usize,
    patience: Pin<Box<Sleep>>,
}

impl Arriving {
    pub(super) fn new(received: Received, admitted: Admitted) -> Self {
        Arriving {
            received,
            admitted,
            counted: 0,
            patience: Box::pin(sleep(PATIENCE)),
        }
    }

    pub(super) fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes, NoRequest>> {
        let message = self.received.poll_message(context);
        if message.is_ready() {
            return message;
        }
        let arrived = self.received.bytes.len();
        let more = arrived - std::mem::replace(&mut self.counted, arrived);
        self.admitted.count(more).map_err(NoRequest::Refused)?;
        ready!(self.patience.as_mut().poll(context));
        Poll::Ready(Err(NoRequest::Refused(Status::deadline_exceeded(
            "the request did not arrive in time",
        ))))
    }
}
