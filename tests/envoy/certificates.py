"""Certificates for TLS, and what a TLS client sees of a server."""
import datetime
import socket
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def new_key():
    return ec.generate_private_key(ec.SECP256R1())


def name_of(common_name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


# What an authority must say that it does. All else a key could be used for is left out.
SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True, crl_sign=False, digital_signature=False, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False)


class Authority:
    """What signs certificates. `pem` is its own."""

    def __init__(self, name):
        self.name, self.key = name_of(name), new_key()
        self.pem = pem(self.sign(self.name, self.key, [
            (x509.BasicConstraints(ca=True, path_length=None), True), (SIGNS_CERTIFICATES, True),
            (x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), False)]))

    def issue(self, name):
        """Files for who is known by this DNS name, as in a Secret: certificate, its key and the authority."""
        key = new_key()
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = self.sign(name_of(name), key, [
            (x509.SubjectAlternativeName([x509.DNSName(name)]), False), (x509.ExtendedKeyUsage(usages), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)])
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return {"tls.crt": pem(certificate), "tls.key": private.decode(), "ca.crt": self.pem}

    def sign(self, subject, key, extensions):
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder().issuer_name(self.name).subject_name(subject).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, is_critical)
        return builder.sign(self.key, hashes.SHA256())


def serial(files):
    """The serial number of the certificate among these files."""
    return x509.load_pem_x509_certificate(files["tls.crt"].encode()).serial_number


class Client:
    """A TLS client that trusts this authority and expects a server of this name; with the files of what it shows, if anything."""

    def __init__(self, authority, server_name, shows=None):
        self.server_name = server_name
        self.context = ssl.create_default_context(cadata=authority.pem)
        self.context.set_alpn_protocols(["h2"])
        if shows:
            self.context.load_cert_chain(shows / "tls.crt", shows / "tls.key")

    def serial_shown(self, port):
        """The serial number of the certificate that it is shown on a new connection."""
        with self.connect(port) as tls:
            return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True)).serial_number

    def refusal(self, port):
        """The reason that the server gives for refusing this client."""
        with self.connect(port) as tls:
            try:
                # TLS 1.3 refuses clients after they have seen the connection established.
                tls.recv(1)
            except ssl.SSLError as refusal:
                return refusal.reason
        return None

    def connect(self, port):
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        return self.context.wrap_socket(connection, server_hostname=self.server_name)
