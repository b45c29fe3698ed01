//! Ports, sockets, certificates, and what people look at.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, date_time_ymd,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tollgate::config::file;
use tollgate::config::{ConnectionAge, Listen, PrometheusConfig};
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate::server::Server;
use tollgate::shutdown::Stop;
use tollgate::tls::TlsConfig;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::support::{
    TestServer, brief, free_port, http, parts, request, rules, server_config, source, wait_until,
};

const RULES: &str = "
domain: d
descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 100, name: n}}
  - {key: u, shadow_mode: true, rate_limit: {unit: 5h, requests_per_unit: 2, window_start: first_hit}}
  - {key: free, rate_limit: {unlimited: true}}
";

fn limiter() -> Limiter {
    let limiter = Limiter::new(LimiterConfig::default());
    limiter.set_matcher(rules(RULES));
    limiter
}

// === ports for people ===

#[tokio::test]
async fn the_debug_port_shows_rules_and_counts() {
    let server = TestServer::start(RULES).await;
    let debug = server.debug.expect("the debug port is open");
    let mut client = server.client().await;
    client.should_rate_limit(request("d", &["k=v"])).await.unwrap();

    let (status, shown) = http(debug, "GET", "/rlconfig", "").await;
    assert_eq!(status, 200);
    assert_eq!(
        shown.lines().collect::<Vec<_>>(),
        [
            "d.free: unit=UNKNOWN requests_per_unit=0, shadow_mode: false, quota_mode: false",
            "d.k: unit=HOUR requests_per_unit=100, shadow_mode: false, quota_mode: false",
            "d.u: unit=UNKNOWN requests_per_unit=2, shadow_mode: true, quota_mode: false, limit: 2 per 5 HOUR from \
             the first hit",
        ]
    );
    let (_, stats) = http(debug, "GET", "/stats", "").await;
    assert!(
        stats.contains("ratelimit.service.rate_limit.d.k.total_hits: 1\n"),
        "{stats}"
    );
    let (status, index) = http(debug, "GET", "/whatever", "").await;
    assert_eq!(status, 200);
    assert!(
        index.contains("/rlconfig: ") && index.contains("/stats: "),
        "{index}"
    );
}

#[tokio::test]
async fn rules_are_shown_in_order_and_none_before_there_are_any() {
    let server =
        TestServer::start_parts(server_config(), parts(Limiter::new(LimiterConfig::default()))).await;
    let debug = server.debug.expect("the debug port is open");
    assert_eq!(http(debug, "GET", "/rlconfig", "").await, (200, String::new()));
    // As a map holds them they would come in another order each time.
    let domains = ["shop", "edge", "api", "mail", "geo", "corp", "big", "d"].map(|domain| {
        let yaml = format!(
            "domain: {domain}\ndescriptors: [{{key: b, rate_limit: {{unit: day, requests_per_unit: 2}}}}, \
             {{key: a, rate_limit: {{unit: hour, requests_per_unit: 1}}}}]"
        );
        source(domain, &yaml)
    });
    server
        .limiter
        .set_matcher(file::load(&domains, false).unwrap().matcher);
    let shown = http(debug, "GET", "/rlconfig", "").await.1;
    assert_eq!(shown.lines().count(), 16);
    assert!(shown.lines().is_sorted(), "{shown}");
}

#[tokio::test]
async fn a_debug_port_that_is_taken_keeps_nobody_from_serving() {
    let taken = TestServer::start(RULES).await;
    let mut config = server_config();
    config.debug = Some(Listen::Tcp {
        host: "127.0.0.1".into(),
        port: taken.http.port(),
    });
    let server = TestServer::start_parts(config, parts(limiter())).await;
    assert_eq!(server.debug, None);
    assert_eq!(http(server.http, "GET", "/livez", "").await, (200, "ok".into()));
}

#[tokio::test]
async fn prometheus_may_have_a_port_of_its_own() {
    let mut config = server_config();
    config.prometheus = Some(PrometheusConfig {
        listen: free_port(),
        path: "/prometheus".into(),
    });
    let server = TestServer::start_parts(config, parts(limiter())).await;
    let address = server.prometheus.expect("it is open");
    let (status, page) = http(address, "GET", "/prometheus", "").await;
    assert_eq!(status, 200);
    assert!(
        page.contains("# TYPE ratelimit_service_config_load_success counter"),
        "{page}"
    );
    assert_eq!(http(address, "GET", "/metrics", "").await.0, 404);
}

// === gRPC over a Unix socket ===

async fn over_socket(path: &Path) -> Channel {
    let path = path.to_owned();
    let connector = service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://socket");
    endpoint.connect_with_connector(connector).await.unwrap()
}

#[tokio::test]
async fn a_unix_socket_serves_and_one_that_is_left_over_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("grpc.sock");
    // Left over by a process that is gone.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let mut config = server_config();
    config.grpc.listen = Listen::Unix(path.clone());
    let server = TestServer::start_parts(config.clone(), parts(limiter())).await;
    let mut client = RateLimitServiceClient::new(over_socket(&path).await);
    let answer = client.should_rate_limit(request("d", &["k=v"])).await.unwrap();
    assert_eq!(brief(&answer.into_inner()), "OK: OK99");

    let error = Server::bind(config.clone(), parts(limiter())).await.unwrap_err();
    assert!(
        error.to_string().starts_with("cannot listen on the socket "),
        "{error}"
    );
    // Who comes second has taken nothing away.
    let mut client = RateLimitServiceClient::new(over_socket(&path).await);
    let answer = client.should_rate_limit(request("d", &["k=v"])).await.unwrap();
    assert_eq!(brief(&answer.into_inner()), "OK: OK98");
    let file = directory.path().join("file");
    fs::write(&file, "precious").unwrap();
    config.grpc.listen = Listen::Unix(file.clone());
    Server::bind(config, parts(limiter())).await.unwrap_err();
    assert_eq!(fs::read_to_string(file).unwrap(), "precious");
    server.ask_to_stop(Stop::Soon).await;
    server.ended().await.unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn a_socket_that_another_server_has_put_in_its_place_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("grpc.sock");
    let mut config = server_config();
    config.grpc.listen = Listen::Unix(path.clone());
    let first = TestServer::start_parts(config.clone(), parts(limiter())).await;
    fs::rename(&path, directory.path().join("moved")).unwrap();
    let _second = TestServer::start_parts(config, parts(limiter())).await;
    first.ask_to_stop(Stop::Soon).await;
    first.ended().await.unwrap();
    let mut client = RateLimitServiceClient::new(over_socket(&path).await);
    client.should_rate_limit(request("d", &["k=v"])).await.unwrap();
}

// === the age of connections ===

/// A client of tonic may lose a call when its connection ends, as it does not send it again. It must not have been counted.
#[tokio::test(flavor = "multi_thread")]
async fn connections_end_at_different_times_and_no_answer_is_lost() {
    const CLIENTS: usize = 20;
    let mut config = server_config();
    config.grpc.max_connection_age = Some(ConnectionAge {
        most: Duration::from_millis(500),
        grace: Duration::from_secs(5),
    });
    let server = TestServer::start_parts(config, parts(limiter())).await;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = server.client().await;
        clients.push(tokio::spawn(async move {
            let (mut answers, mut lost) = (0u64, 0);
            while lost < 3 {
                match client.should_rate_limit(request("d", &["k=v"])).await {
                    Ok(_) => answers += 1,
                    Err(_) => lost += 1,
                }
                sleep(Duration::from_millis(5)).await;
                // Three lives of a connection.
                if answers > 300 {
                    break;
                }
            }
            answers
        }));
    }
    let mut answers = 0;
    for client in clients {
        answers += client.await.unwrap();
    }
    let (_, page) = http(server.http, "GET", "/metrics", "").await;
    let counted = format!("ratelimit_service_total_requests{{grpc_method=\"ShouldRateLimit\"}} {answers}\n");
    assert!(page.contains(&counted), "{answers} answers, {page}");
    let connections = page
        .lines()
        .find_map(|line| line.strip_prefix("tollgate_grpc_connections_total "))
        .unwrap();
    assert!(
        connections.parse::<usize>().unwrap() >= 2 * CLIENTS,
        "{connections} connections"
    );
}

#[tokio::test]
async fn a_client_that_ignores_the_end_of_its_connection_is_cut_off() {
    let mut config = server_config();
    config.grpc.max_connection_age = Some(ConnectionAge {
        most: Duration::from_millis(500),
        grace: Duration::from_millis(200),
    });
    let server = TestServer::start_parts(config, parts(limiter())).await;
    let mut connection = TcpStream::connect(server.grpc).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(
        &mut connection,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    )
    .await
    .unwrap();
    let mut received = Vec::new();
    let end = tokio::io::AsyncReadExt::read_to_end(&mut connection, &mut received);
    // It is closed, or reset.
    let _ = timeout(Duration::from_secs(5), end)
        .await
        .expect("the connection ends");
}

// === certificates ===

/// An authority, and files with what it has signed.
struct Authority {
    directory: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut parameters = CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.self_signed(&key).unwrap();
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("ca.crt"), certificate.pem()).unwrap();
        Authority {
            directory,
            issuer: Issuer::new(parameters, key),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes `file.crt` and `file.key`, valid for `name` until the end of `year`.
    fn sign(&self, file: &str, name: &str, year: i32) {
        let mut parameters = CertificateParams::new(vec![name.to_owned()]).unwrap();
        parameters.not_before = date_time_ymd(2020, 1, 1);
        parameters.not_after = date_time_ymd(year, 12, 31);
        parameters.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        // The key first, as a half-written pair.
        fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
        fs::write(self.path(&format!("{file}.crt")), certificate.pem()).unwrap();
    }

    fn tls(&self, mutual: bool) -> TlsConfig {
        TlsConfig {
            certificate: self.path("server.crt"),
            key: self.path("server.key"),
            client_authority: mutual.then(|| self.path("ca.crt")),
            client_name: mutual.then(|| ServerName::try_from("envoy.mesh.local").unwrap()),
            protocols: &[b"h2"],
            named_by: "GRPC_SERVER_TLS_CERT, GRPC_SERVER_TLS_KEY",
        }
    }

    /// What a client trusts and shows.
    fn client(&self, identity: Option<(&Authority, &str)>) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(self.path("ca.crt")).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match identity {
            Some((authority, file)) => builder
                .with_client_auth_cert(
                    vec![CertificateDer::from_pem_file(authority.path(&format!("{file}.crt"))).unwrap()],
                    PrivateKeyDer::from_pem_file(authority.path(&format!("{file}.key"))).unwrap(),
                )
                .unwrap(),
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        config
    }
}

/// A call over a new TLS connection.
async fn call_over_tls(server: &TestServer, config: ClientConfig) -> Result<String, String> {
    let mut client = over_tls(server, config).await?;
    let answer = client.should_rate_limit(request("d", &["k=v"])).await;
    answer
        .map(|answer| brief(&answer.into_inner()))
        .map_err(|status| format!("{status:?}"))
}

async fn over_tls(
    server: &TestServer,
    config: ClientConfig,
) -> Result<RateLimitServiceClient<Channel>, String> {
    let connector = TlsConnector::from(Arc::new(config));
    let address = server.grpc;
    let connector = service_fn(move |_| {
        let connector = connector.clone();
        async move {
            let stream = TcpStream::connect(address).await?;
            let name = ServerName::try_from("tollgate.mesh").unwrap();
            connector.connect(name, stream).await.map(TokioIo::new)
        }
    });
    let endpoint = Endpoint::from_static("http://tollgate.mesh");
    let channel = endpoint
        .connect_with_connector(connector)
        .await
        .map_err(|error| format!("{error:?}"))?;
    Ok(RateLimitServiceClient::new(channel))
}

#[tokio::test]
async fn only_clients_with_a_certificate_for_the_right_name_are_served() {
    let (authority, other) = (Authority::new(), Authority::new());
    authority.sign("server", "tollgate.mesh", 2099);
    authority.sign("envoy", "envoy.mesh.local", 2099);
    authority.sign("wildcard", "*.mesh.local", 2099);
    authority.sign("stranger", "stranger.mesh.local", 2099);
    authority.sign("expired", "envoy.mesh.local", 2022);
    other.sign("envoy", "envoy.mesh.local", 2099);
    let mut config = server_config();
    config.grpc.tls = Some(authority.tls(true));
    let server = TestServer::start_parts(config, parts(limiter())).await;
    for (identity, is_served) in [
        (Some((&authority, "envoy")), true),
        (Some((&authority, "wildcard")), true),
        (Some((&authority, "stranger")), false),
        (Some((&authority, "expired")), false),
        (Some((&other, "envoy")), false),
        (None, false),
    ] {
        let served = call_over_tls(&server, authority.client(identity)).await;
        let name = identity.map(|(_, name)| name);
        assert_eq!(served.is_ok(), is_served, "{name:?}: {served:?}");
    }
    // Who speaks no TLS is not served, and harms nobody.
    let plain = Endpoint::from_shared(format!("http://{}", server.grpc))
        .unwrap()
        .connect()
        .await;
    if let Ok(channel) = plain {
        let mut client = RateLimitServiceClient::new(channel);
        client
            .should_rate_limit(request("d", &["k=v"]))
            .await
            .unwrap_err();
    }
    call_over_tls(&server, authority.client(Some((&authority, "envoy"))))
        .await
        .unwrap();
}

async fn expiry(server: &TestServer) -> f64 {
    of_certificate(server, "expiry_seconds").await
}

async fn load_errors(server: &TestServer) -> f64 {
    of_certificate(server, "load_errors_total").await
}

async fn of_certificate(server: &TestServer, metric: &str) -> f64 {
    self::metric(server, &format!("tollgate_certificate_{metric}{{port=\"grpc\"}}")).await
}

async fn metric(server: &TestServer, metric: &str) -> f64 {
    let (_, page) = http(server.http, "GET", "/metrics", "").await;
    let prefix = format!("{metric} ");
    let value = page.lines().find_map(|line| line.strip_prefix(&prefix));
    value.expect("it is in the metrics").parse().unwrap()
}

#[tokio::test]
async fn a_certificate_is_replaced_by_a_good_one_and_by_no_other() {
    let authority = Authority::new();
    authority.sign("server", "tollgate.mesh", 2098);
    let mut config = server_config();
    config.grpc.tls = Some(authority.tls(false));
    let server = TestServer::start_parts(config, parts(limiter())).await;
    let first = expiry(&server).await;
    let mut old = over_tls(&server, authority.client(None)).await.unwrap();
    old.should_rate_limit(request("d", &["k=v"])).await.unwrap();

    let good = ["server.crt", "server.key"].map(|file| (file, fs::read(authority.path(file)).unwrap()));
    for bad in ["expired", "half a pair", "no certificate", "no files"] {
        // From a good pair on, so that each fault is the only one.
        for (file, content) in &good {
            fs::write(authority.path(file), content).unwrap();
        }
        let refusals = load_errors(&server).await;
        match bad {
            "expired" => authority.sign("server", "tollgate.mesh", 2022),
            "half a pair" => fs::write(
                authority.path("server.key"),
                KeyPair::generate().unwrap().serialize_pem(),
            )
            .unwrap(),
            "no certificate" => fs::write(authority.path("server.crt"), "nothing").unwrap(),
            _ => good
                .iter()
                .for_each(|(file, _)| fs::remove_file(authority.path(file)).unwrap()),
        }
        wait_until(&format!("{bad} to be seen"), async || {
            load_errors(&server).await > refusals
        })
        .await;
        assert_eq!(expiry(&server).await, first, "{bad}");
        call_over_tls(&server, authority.client(None)).await.unwrap();
    }

    authority.sign("server", "tollgate.mesh", 2099);
    wait_until("the new certificate", async || expiry(&server).await != first).await;
    call_over_tls(&server, authority.client(None)).await.unwrap();
    let connections = metric(&server, "tollgate_grpc_connections_total").await;
    old.should_rate_limit(request("d", &["k=v"])).await.unwrap();
    assert_eq!(
        metric(&server, "tollgate_grpc_connections_total").await,
        connections,
        "the first connection is still there"
    );
}

#[tokio::test]
async fn certificates_that_cannot_be_used_at_the_start_are_named() {
    let authority = Authority::new();
    authority.sign("server", "tollgate.mesh", 2022);
    let mut config = server_config();
    config.grpc.tls = Some(authority.tls(false));
    let fault = async |config: &tollgate::config::ServerConfig| {
        let error = Server::bind(config.clone(), parts(limiter())).await.unwrap_err();
        format!("{}: {}", error, std::error::Error::source(&error).unwrap())
    };
    let expired = fault(&config).await;
    assert!(
        expired.contains("server.crt: the certificate expired at"),
        "{expired}"
    );
    authority.sign("server", "tollgate.mesh", 2099);
    let [certificate, key] = ["server.crt", "server.key"].map(|file| authority.path(file));
    let good_key = fs::read_to_string(&key).unwrap();
    for (bad_key, said) in [
        (
            good_key.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY"),
            "the key has a pass phrase",
        ),
        (
            good_key.replacen(
                "-\n",
                "-\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,A8B9\n\n",
                1,
            ),
            "the key has a pass phrase",
        ),
        (fs::read_to_string(&certificate).unwrap(), "no private key in it"),
    ] {
        fs::write(&key, bad_key).unwrap();
        let bad = fault(&config).await;
        assert!(bad.contains(&format!("server.key: {said}")), "{bad}");
        assert!(bad.contains("GRPC_SERVER_TLS_KEY"), "{bad}");
    }
    fs::write(&certificate, good_key).unwrap();
    let swapped = fault(&config).await;
    assert!(swapped.contains("server.crt: no certificate in it"), "{swapped}");
    fs::remove_file(&certificate).unwrap();
    let missing = fault(&config).await;
    assert!(missing.contains("server.crt: "), "{missing}");
}
