//! Counters in a file, so that a restart does not hand every client a fresh limit.
//!
//! The file is a head of a name, a version, both clocks and the secret of the keys, then the counters as they are in memory,
//! then a checksum over all of it; numbers are little-endian. It is written beside its place and moved there, so that what is
//! there is always whole. The secret would let somebody aim at a counter: only the owner may read the file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read as _, Seek as _, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use siphasher::sip128::{Hasher128 as _, SipHasher13};
use thiserror::Error;

use super::memory::MemoryStore;
use crate::algorithm::State;
use crate::clock::{Timestamp, nanoseconds};
use crate::key::{CounterKey, KeyMaker};

/// What every snapshot begins with.
const NAME: &[u8; 16] = b"tollgate counts\n";

/// Changes with every change of what states or keys mean.
const VERSION: u64 = 2;

/// Name, version, two clocks, two words of the secret.
const HEAD_BYTES: usize = NAME.len() + 5 * 8;

/// Two words of the key, two of the state.
const COUNTER_BYTES: usize = 4 * 8;

/// A 128-bit hash of everything before it.
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
    /// Held while one is written: the last one may come while another is still under way.
    writing: Mutex<()>,
}

/// Counters as they were when a snapshot was taken. They stay in the file until they are asked for.
#[derive(Debug)]
pub struct Snapshot {
    file: File,
    /// Both clocks when it was taken.
    taken: Timestamp,
    keys: KeyMaker,
    counters: u64,
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
        match File::open(&self.path) {
            Ok(file) => Snapshot::open(file).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Moves a file that is of no use out of the way, in the place of one that was moved there before. Returns where it is.
    pub fn set_aside(&self) -> io::Result<PathBuf> {
        let aside = self.beside("unusable");
        fs::rename(&self.path, &aside)?;
        Ok(aside)
    }

    /// Writes the counters of `store`. Each shard is held only while it is copied. What was there stays if this fails.
    pub fn write(&self, store: &MemoryStore, keys: &KeyMaker, now: Timestamp) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let new = self.beside(&format!("{}.new", process::id()));
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
    // A file of its own, since one that is there keeps its permissions.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
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
    /// Reads all of it once, to see that it is whole.
    fn open(file: File) -> Result<Self, SnapshotError> {
        let length = file.metadata()?.len();
        let mut bytes = BufReader::with_capacity(1 << 16, &file);
        let mut checksum = SipHasher13::new();
        let mut head = [0; HEAD_BYTES];
        let mut head_length = 0;
        while head_length < HEAD_BYTES {
            match bytes.read(&mut head[head_length..])? {
                0 => break,
                read => head_length += read,
            }
        }
        std::hash::Hasher::write(&mut checksum, &head[..head_length]);
        if !head[..head_length].starts_with(NAME) {
            return Err(SnapshotError::Foreign);
        }
        let word = |index: usize| word(&head[NAME.len() + 8 * index..]);
        if head_length == HEAD_BYTES && word(0) != VERSION {
            return Err(SnapshotError::OtherVersion);
        }
        let counters_bytes = length
            .checked_sub((HEAD_BYTES + CHECKSUM_BYTES) as u64)
            .filter(|bytes| bytes.is_multiple_of(COUNTER_BYTES as u64))
            .ok_or(SnapshotError::Damaged)?;
        let counters = counters_bytes / COUNTER_BYTES as u64;
        let mut counter = [0; COUNTER_BYTES];
        for _ in 0..counters {
            bytes.read_exact(&mut counter)?;
            std::hash::Hasher::write(&mut checksum, &counter);
        }
        let mut written = [0; CHECKSUM_BYTES];
        bytes.read_exact(&mut written)?;
        if written != checksum.finish128().as_u128().to_le_bytes() {
            return Err(SnapshotError::Damaged);
        }
        Ok(Snapshot {
            taken: Timestamp {
                since_epoch: Duration::from_nanos(word(1)),
                monotonic: Duration::from_nanos(word(2)),
            },
            keys: KeyMaker::with_secret([word(3), word(4)]),
            counters,
            file,
        })
    }

    /// What the monotonic clock of a process that starts at `now` begins with, so that all counters go on where they were:
    /// what it was when the snapshot was taken, and what has passed since by the wall clock. Nothing has if that was set
    /// back.
    pub fn monotonic_at(&self, now: Timestamp) -> Duration {
        let passed = now.since_epoch.saturating_sub(self.taken.since_epoch);
        self.taken.monotonic.saturating_add(passed)
    }

    /// The maker of its keys.
    pub fn keys(&self) -> KeyMaker {
        self.keys.clone()
    }

    /// Hands out its counters, one after the other.
    pub fn read_counters(&self, mut take: impl FnMut(CounterKey, State)) -> io::Result<()> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(HEAD_BYTES as u64))?;
        let mut bytes = BufReader::with_capacity(1 << 16, file);
        let mut counter = [0; COUNTER_BYTES];
        for _ in 0..self.counters {
            bytes.read_exact(&mut counter)?;
            let word = |index: usize| word(&counter[8 * index..]);
            take(
                CounterKey::from_words([word(0), word(1)]),
                State([word(2), word(3)]),
            );
        }
        Ok(())
    }
}

/// The number that `bytes` begin with.
fn word(bytes: &[u8]) -> u64 {
    let (word, _) = bytes.split_first_chunk().expect("the length was checked");
    u64::from_le_bytes(*word)
}
