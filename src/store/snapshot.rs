//! Counters in a file, so that a restart does not hand every client a fresh limit.
//!
//! The file is a head of a name, a version, both clocks and the secret of the keys, then the counters as they are in memory,
//! then a checksum over all of it; numbers are little-endian. It is written beside its place and moved there, so that what is
//! there is always whole. The secret would let somebody aim at a counter: only the owner may read the file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use siphasher::sip128::{Hasher128 as _, SipHasher13};
use thiserror::Error;

use super::memory::MemoryStore;
use crate::algorithm::State;
use crate::clock::Timestamp;
use crate::key::{CounterKey, KeyMaker};

const NAME: &[u8; 16] = b"tollgate counts\n";

/// Changes with every change of what states or keys mean.
const VERSION: u64 = 1;

/// Name, version, two clocks, two words of the secret.
const HEAD_BYTES: usize = 16 + 5 * 8;

const COUNTER_BYTES: usize = 4 * 8;

const CHECKSUM_BYTES: usize = 16;

/// Why a file is of no use.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// It cannot be read.
    #[error("{0}")]
    Unreadable(#[from] io::Error),
    /// It is something else.
    #[error("it is no snapshot")]
    Foreign,
    /// It is a snapshot with another meaning.
    #[error("it is of another version of tollgate")]
    OtherVersion,
    /// It was cut or changed.
    #[error("it is damaged")]
    Damaged,
}

/// Where snapshots are kept. Writes one at a time.
#[derive(Debug)]
pub struct SnapshotFile {
    path: PathBuf,
    writing: Mutex<()>,
}

/// Counters as they were when a snapshot was taken.
pub struct Snapshot {
    bytes: Vec<u8>,
}

// === impl SnapshotFile ===

impl SnapshotFile {
    /// Snapshots at `path`.
    pub fn new(path: PathBuf) -> Self {
        SnapshotFile {
            path,
            writing: Mutex::new(()),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the last snapshot. `None` if there is none yet.
    pub fn read(&self) -> Result<Option<Snapshot>, SnapshotError> {
        match fs::read(&self.path) {
            Ok(bytes) => Snapshot::new(bytes).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Moves a file that is of no use out of the way, so that nothing of it is lost. Returns where it is now.
    pub fn set_aside(&self) -> io::Result<PathBuf> {
        let aside = self.beside("unusable");
        fs::rename(&self.path, &aside)?;
        Ok(aside)
    }

    /// Writes the counters of `store`. Each shard is held only while it is copied. What was there stays if this fails.
    pub fn write(&self, store: &MemoryStore, keys: &KeyMaker, now: Timestamp) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let new = self.beside("new");
        let written = write_to(&new, store, keys, now).and_then(|()| fs::rename(&new, &self.path));
        if written.is_err() {
            // The first error says more.
            let _ = fs::remove_file(&new);
        }
        written
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".");
        name.push(suffix);
        name.into()
    }
}

fn write_to(path: &Path, store: &MemoryStore, keys: &KeyMaker, now: Timestamp) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    let mut out = Checked {
        out: BufWriter::with_capacity(1 << 16, file),
        checksum: SipHasher13::new(),
    };
    out.write(NAME)?;
    let [secret, more_secret] = keys.secret();
    for word in [
        VERSION,
        nanoseconds(now.since_epoch),
        nanoseconds(now.monotonic),
        secret,
        more_secret,
    ] {
        out.write(&word.to_le_bytes())?;
    }
    store.copy_shards(|counters| {
        counters.into_iter().try_for_each(|(key, State(state))| {
            let words = [key.words(), state];
            words
                .as_flattened()
                .iter()
                .try_for_each(|word| out.write(&word.to_le_bytes()))
        })
    })?;
    let checksum = out.checksum.finish128().as_u128();
    out.write(&checksum.to_le_bytes())?;
    let file: File = out.out.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_data()
}

/// Sums up what goes through it.
struct Checked<W> {
    out: W,
    checksum: SipHasher13,
}

impl<W: Write> Checked<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        std::hash::Hasher::write(&mut self.checksum, bytes);
        self.out.write_all(bytes)
    }
}

// === impl Snapshot ===

impl Snapshot {
    fn new(bytes: Vec<u8>) -> Result<Self, SnapshotError> {
        if !bytes.starts_with(NAME) {
            return Err(SnapshotError::Foreign);
        }
        let snapshot = Snapshot { bytes };
        let length = snapshot.bytes.len();
        let is_whole = length >= HEAD_BYTES + CHECKSUM_BYTES
            && (length - HEAD_BYTES - CHECKSUM_BYTES).is_multiple_of(COUNTER_BYTES);
        if length >= HEAD_BYTES && snapshot.head(0) != VERSION {
            return Err(SnapshotError::OtherVersion);
        }
        if !is_whole || snapshot.sum() != snapshot.bytes[length - CHECKSUM_BYTES..] {
            return Err(SnapshotError::Damaged);
        }
        Ok(snapshot)
    }

    fn sum(&self) -> [u8; CHECKSUM_BYTES] {
        let mut checksum = SipHasher13::new();
        std::hash::Hasher::write(&mut checksum, &self.bytes[..self.bytes.len() - CHECKSUM_BYTES]);
        checksum.finish128().as_u128().to_le_bytes()
    }

    /// A word of the head, after the name.
    fn head(&self, index: usize) -> u64 {
        word(&self.bytes[16 + 8 * index..])
    }

    /// What the monotonic clock of a process that starts at `now` begins with, so that all counters go on where they were:
    /// what it was when the snapshot was taken, and what has passed since by the wall clock. Nothing has if that was set
    /// back.
    pub fn monotonic_at(&self, now: Timestamp) -> Duration {
        let passed = nanoseconds(now.since_epoch).saturating_sub(self.head(1));
        Duration::from_nanos(self.head(2).saturating_add(passed))
    }

    /// The maker of its keys.
    pub fn keys(&self) -> KeyMaker {
        KeyMaker::with_secret([self.head(3), self.head(4)])
    }

    /// Its counters.
    pub fn counters(&self) -> impl Iterator<Item = (CounterKey, State)> {
        let counters = &self.bytes[HEAD_BYTES..self.bytes.len() - CHECKSUM_BYTES];
        counters.chunks_exact(COUNTER_BYTES).map(|counter| {
            let word = |index: usize| word(&counter[8 * index..]);
            (
                CounterKey::from_words([word(0), word(1)]),
                State([word(2), word(3)]),
            )
        })
    }
}

impl std::fmt::Debug for Snapshot {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot")
            .field("counters", &self.counters().count())
            .finish_non_exhaustive()
    }
}

/// The number that `bytes` begin with.
fn word(bytes: &[u8]) -> u64 {
    let (word, _) = bytes.split_first_chunk().expect("the length was checked");
    u64::from_le_bytes(*word)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
