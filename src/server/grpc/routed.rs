//! Calls of other methods than the one that decides, answered by tonic's routes: health and reflection.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt as _;
use tokio::time::timeout;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service as _, StdError};

use super::admission::Admitted;
use super::arriving::PATIENCE;
use super::calls::{Services, refuse};
use crate::shutdown;

/// The one method of health that is no stream: it is counted and timed, as envoyproxy/ratelimit does with every such method.
const CHECK: &str = "/grpc.health.v1.Health/Check";

/// Answers a call.
pub(super) async fn answer(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    admitted: Admitted,
    services: Arc<Services>,
) {
    let start = services.clock.monotonic();
    let is_check = request.uri().path() == CHECK;
    let closed = Box::pin(shutdown::closed(services.closed.clone()));
    let request = request.map(|body| {
        Body::new(Incoming {
            body,
            admitted,
            closed,
        })
    });
    let mut routes = services.routes.clone();
    let response = tokio::select! {
        response = timeout(PATIENCE, routes.call(request)) => response,
        _ = poll_fn(|context| respond.poll_reset(context)) => return,
    };
    if is_check {
        let took = services.clock.monotonic().saturating_sub(start);
        services.metrics.note_health_check(took);
    }
    // An error means that the client has gone away.
    let _ = match response {
        Ok(Ok(response)) => send(respond, response).await,
        Err(_) => refuse(
            respond,
            &Status::deadline_exceeded("the request did not arrive in time"),
        ),
    };
}

async fn send(mut respond: SendResponse<Bytes>, response: Response<Body>) -> Result<(), h2::Error> {
    let (head, mut body) = response.into_parts();
    let head = Response::from_parts(head, ());
    if body.is_end_stream() {
        return respond.send_response(head, true).map(drop);
    }
    let mut stream = respond.send_response(head, false)?;
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            reset = poll_fn(|context| stream.poll_reset(context)) => return reset.map(drop),
        };
        let Some(Ok(frame)) = frame else {
            return stream.send_data(Bytes::new(), true);
        };
        match frame.into_data() {
            Ok(data) => send_data(&mut stream, data).await?,
            Err(frame) => {
                let trailers = frame.into_trailers().unwrap_or_default();
                return stream.send_trailers(trailers);
            }
        }
    }
}

/// Sends as much at a time as the client takes.
async fn send_data(stream: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let Some(capacity) = poll_fn(|context| stream.poll_capacity(context)).await else {
            return Err(h2::Reason::CANCEL.into());
        };
        let part = data.split_to(capacity?.min(data.len()));
        stream.send_data(part, false)?;
    }
    Ok(())
}

/// The body of a request, which ends when everything is to close: streams would go on for ever.
struct Incoming<F> {
    body: RecvStream,
    admitted: Admitted,
    closed: Pin<Box<F>>,
}

impl<F: Future<Output = ()>> HttpBody for Incoming<F> {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        let Poll::Ready(part) = self.body.poll_data(context) else {
            ready!(self.closed.as_mut().poll(context));
            return Poll::Ready(None);
        };
        let Some(part) = part.transpose()? else {
            return Poll::Ready(None);
        };
        self.body.flow_control().release_capacity(part.len())?;
        self.admitted.count(part.len())?;
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
