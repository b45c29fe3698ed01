//! TLS for a port: certificates from files, read again when they change. A pair that cannot be used never replaces a good one.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
};
use thiserror::Error;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, error, warn};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::clock::Clock;
use crate::file_watch::FileWatch;

/// Where the certificates of a port are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsConfig {
    /// The chain of the server, its own certificate first, in PEM.
    pub certificate: PathBuf,
    /// The private key of the first, in PEM.
    pub key: PathBuf,
    /// The authorities of which clients must show a certificate, in PEM. Without it no certificate is asked for.
    pub client_authority: Option<PathBuf>,
    /// The DNS name for which the certificates of clients must be valid.
    pub client_name: Option<ServerName<'static>>,
    /// Protocols to agree on, the first one that the client knows.
    pub protocols: &'static [&'static [u8]],
    /// What says where the files are, for whoever has to mend it.
    pub named_by: &'static str,
}

/// Why certificates cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file is not there, cannot be read, or is not what it must be.
    #[error("{}: {fault}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        fault: pem::Error,
    },
    /// A file of certificates has none.
    #[error("{}: no certificate in it", .0.display())]
    NoCertificate(PathBuf),
    /// A file that is to hold a key has none.
    #[error("{}: no private key in it", .0.display())]
    NoKey(PathBuf),
    /// The key is encrypted, and nobody is there to ask for its pass phrase.
    #[error("{}: the key has a pass phrase; write it without one", .0.display())]
    PassPhrase(PathBuf),
    /// The certificate's time is over.
    #[error("{}: the certificate expired at {expiry}", path.display())]
    Expired {
        /// The file.
        path: PathBuf,
        /// When.
        expiry: String,
    },
    /// A certificate is malformed.
    #[error("{}: malformed certificate", .0.display())]
    Malformed(PathBuf),
    /// An authority cannot be trusted.
    #[error("{}: {fault}", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// Why not.
        fault: rustls::Error,
    },
    /// Nobody could be verified against the authorities.
    #[error("cannot verify clients: {0}")]
    Verifier(rustls::server::VerifierBuilderError),
    /// Certificate and key do not go together, or cannot be used.
    #[error("{} and {}: {fault}", certificate.display(), key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why not.
        fault: rustls::Error,
    },
}

/// What a port does TLS with.
#[derive(Debug)]
pub struct Tls {
    config: TlsConfig,
    clock: Arc<Clock>,
    current: ArcSwap<ServerConfig>,
    /// In seconds since 1970.
    expiry: AtomicI64,
    load_errors: AtomicU64,
    handshake_errors: AtomicU64,
}

/// A [`Tls`], and how to notice that its files have changed.
#[derive(Debug)]
pub(crate) struct TlsWatch {
    tls: Arc<Tls>,
    watch: FileWatch,
}

// === impl TlsConfig ===

impl TlsConfig {
    fn files(&self) -> Vec<PathBuf> {
        let authority = self.client_authority.iter().cloned();
        [self.certificate.clone(), self.key.clone()]
            .into_iter()
            .chain(authority)
            .collect()
    }

    /// Reads the files. Also when the server's certificate expires, in seconds since 1970.
    fn load(&self, now: u64) -> Result<(ServerConfig, i64), TlsError> {
        let chain = certificates(&self.certificate)?;
        let expiry = self.expiry(&chain[0], now)?;
        let key = private_key(&self.key)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("the provider knows TLS 1.2 and 1.3");
        let builder = match &self.client_authority {
            Some(authority) => builder.with_client_cert_verifier(self.verifier(authority, provider)?),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|fault| TlsError::Pair {
                certificate: self.certificate.clone(),
                key: self.key.clone(),
                fault,
            })?;
        config.alpn_protocols = self.protocols.iter().map(|name| name.to_vec()).collect();
        Ok((config, expiry))
    }

    fn expiry(&self, certificate: &CertificateDer<'_>, now: u64) -> Result<i64, TlsError> {
        let (_, certificate) = X509Certificate::from_der(certificate)
            .map_err(|_| TlsError::Malformed(self.certificate.clone()))?;
        let expiry = certificate.validity().not_after;
        if expiry.timestamp() <= now.cast_signed() {
            return Err(TlsError::Expired {
                path: self.certificate.clone(),
                expiry: expiry.to_string(),
            });
        }
        Ok(expiry.timestamp())
    }

    fn verifier(
        &self,
        authority: &Path,
        provider: Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(authority)? {
            roots.add(certificate).map_err(|fault| TlsError::Authority {
                path: authority.to_owned(),
                fault,
            })?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(TlsError::Verifier)?;
        Ok(match &self.client_name {
            Some(name) => Arc::new(NamedClient {
                verifier,
                name: name.clone(),
            }),
            None => verifier,
        })
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|fault| TlsError::File {
        path: path.to_owned(),
        fault,
    })?;
    if certificates.is_empty() {
        return Err(TlsError::NoCertificate(path.to_owned()));
    }
    Ok(certificates)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|fault| {
        let path = path.to_owned();
        match fault {
            _ if is_encrypted(&path) => TlsError::PassPhrase(path),
            pem::Error::NoItemsFound => TlsError::NoKey(path),
            fault => TlsError::File { path, fault },
        }
    })
}

/// Whether a key that cannot be read says that it is encrypted: PKCS #8 does so in its first line, older formats in a header.
fn is_encrypted(path: &Path) -> bool {
    fs::read_to_string(path).is_ok_and(|text| text.contains("ENCRYPTED"))
}

// === impl Tls ===

impl Tls {
    /// What accepts the next connection.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.current.load_full())
    }

    /// When the server's certificate expires, in seconds since 1970.
    pub fn expiry(&self) -> i64 {
        self.expiry.load(Ordering::Relaxed)
    }

    /// How often changed certificates could not be used.
    pub fn load_errors(&self) -> u64 {
        self.load_errors.load(Ordering::Relaxed)
    }

    /// How often a client and the server did not agree on TLS.
    pub fn handshake_errors(&self) -> u64 {
        self.handshake_errors.load(Ordering::Relaxed)
    }

    pub(crate) fn note_handshake_error(&self) {
        self.handshake_errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes up the files. What is wrong with them is told only if they have not changed meanwhile.
    fn reload(&self, is_unchanged: impl FnOnce() -> bool) {
        match self.config.load(self.clock.now().unix_seconds()) {
            Ok((config, expiry)) => {
                self.current.store(Arc::new(config));
                self.expiry.store(expiry, Ordering::Relaxed);
                let certificate = self.config.certificate.display();
                warn!(expiry, "loaded the changed certificate {certificate}");
            }
            Err(fault) if !is_unchanged() => debug!(%fault, "certificates changed while they were read"),
            Err(fault) => {
                self.load_errors.fetch_add(1, Ordering::Relaxed);
                error!("cannot load the changed certificates, the last good ones stay in use: {fault}");
            }
        }
    }
}

// === impl TlsWatch ===

impl TlsWatch {
    /// Reads the certificates.
    pub(crate) fn load(config: TlsConfig, clock: Arc<Clock>) -> Result<Self, TlsError> {
        // Before they are read, so that no change is missed.
        let watch = FileWatch::new(config.files());
        let (current, expiry) = config.load(clock.now().unix_seconds())?;
        let tls = Arc::new(Tls {
            config,
            clock,
            current: ArcSwap::from_pointee(current),
            expiry: expiry.into(),
            load_errors: AtomicU64::default(),
            handshake_errors: AtomicU64::default(),
        });
        Ok(TlsWatch { tls, watch })
    }

    /// What is in use.
    pub(crate) fn tls(&self) -> Arc<Tls> {
        Arc::clone(&self.tls)
    }

    /// Looks at the files, and reads them if they have changed. Blocks while it reads.
    pub(crate) fn look(&mut self) {
        if self.watch.is_news(self.tls.config.files()) {
            let is_unchanged = || self.watch.is_unchanged(self.tls.config.files());
            self.tls.reload(is_unchanged);
        }
    }
}

/// Wants of clients also that their certificate is for a name.
#[derive(Debug)]
struct NamedClient {
    verifier: Arc<dyn ClientCertVerifier>,
    name: ServerName<'static>,
}

impl ClientCertVerifier for NamedClient {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self
            .verifier
            .verify_client_cert(certificate, intermediates, now)?;
        let parsed = ParsedCertificate::try_from(certificate)?;
        rustls::client::verify_server_name(&parsed, &self.name)
            .map_err(|_| rustls::Error::InvalidCertificate(CertificateError::NotValidForName))?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
