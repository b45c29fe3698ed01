//! Where rule files come from: files and directories.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;
use walkdir::{DirEntry, WalkDir};

/// How large a rule file may be, in bytes: some million rules.
const LARGEST_FILE: u64 = 256 << 20;

/// A rule file as read.
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// What messages call it; usually its path.
    pub name: String,
    /// Its content.
    pub text: String,
}

/// A path that cannot be read as rules.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The path itself, or a file below it.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// What was to be read.
        path: PathBuf,
        /// Why that failed.
        source: io::Error,
    },
    /// The file is no rule file that anybody would write.
    #[error("{}: larger than {LARGEST_FILE} bytes; split it, or keep it out of the rules", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The file holds something else than text.
    #[error("{}: not UTF-8 from byte {valid_up_to} on; save the file as UTF-8, or keep it out of the rules", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// How much of it is UTF-8.
        valid_up_to: usize,
    },
}

/// Reads every rule file of `paths`, in the order given; `-` is the standard input. All failures are reported.
///
/// A directory stands for all files below it, whatever they are called, ordered by path. Left out are entries whose name
/// starts with `..` (Kubernetes keeps the versions of a mounted `ConfigMap` there) and, with `ignore_dotfiles`, all whose
/// name starts with a dot. Links to files are followed, links to directories are not.
pub fn read(paths: &[PathBuf], ignore_dotfiles: bool) -> Result<Vec<SourceFile>, Vec<SourceError>> {
    let mut files = Vec::new();
    let mut errors = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            match io::read_to_string(io::stdin()) {
                Ok(text) => files.push(SourceFile {
                    name: "<stdin>".into(),
                    text,
                }),
                Err(source) => errors.push(SourceError::Unreadable {
                    path: path.clone(),
                    source,
                }),
            }
            continue;
        }
        for file in files_below(path, ignore_dotfiles) {
            match file.and_then(|file| read_file(&file)) {
                Ok(file) => files.push(file),
                Err(error) => errors.push(error),
            }
        }
    }
    if errors.is_empty() { Ok(files) } else { Err(errors) }
}

/// The files that [`read`] would read, in the same order; what cannot be looked into as itself.
pub(super) fn list(paths: &[PathBuf], ignore_dotfiles: bool) -> Vec<PathBuf> {
    let files = paths
        .iter()
        .filter(|path| path.as_os_str() != "-")
        .flat_map(|path| files_below(path, ignore_dotfiles));
    files
        .map(|file| match file {
            Ok(path)
            | Err(
                SourceError::Unreadable { path, .. }
                | SourceError::NotText { path, .. }
                | SourceError::TooLarge { path },
            ) => path,
        })
        .collect()
}

fn files_below(path: &Path, ignore_dotfiles: bool) -> Vec<Result<PathBuf, SourceError>> {
    let walked = WalkDir::new(path)
        .into_iter()
        .filter_entry(|entry| entry.depth() == 0 || !is_hidden(entry, ignore_dotfiles));
    let mut files: Vec<_> = walked
        .filter_map(|entry| match entry {
            Ok(entry) if is_file(&entry) => Some(Ok(entry.into_path())),
            Ok(_) => None,
            Err(error) => {
                let path = error.path().unwrap_or(path).to_owned();
                let source = error
                    .into_io_error()
                    .expect("links to directories are not followed, so there is no loop");
                Some(Err(SourceError::Unreadable { path, source }))
            }
        })
        .collect();
    // The order of merged files decides between wildcards.
    files.sort_by_cached_key(|file| file.as_ref().ok().cloned());
    files
}

fn is_hidden(entry: &DirEntry, ignore_dotfiles: bool) -> bool {
    let name = entry.file_name().as_encoded_bytes();
    name.starts_with(b"..") || (ignore_dotfiles && name.starts_with(b"."))
}

/// Sockets and pipes inside a directory are no rule files; given by name they are read.
fn is_file(entry: &DirEntry) -> bool {
    // A link that leads nowhere counts as a file, so that reading it fails and is reported.
    let (is_file, is_dir) =
        fs::metadata(entry.path()).map_or((true, false), |target| (target.is_file(), target.is_dir()));
    is_file || (entry.depth() == 0 && !is_dir)
}

fn read_file(path: &Path) -> Result<SourceFile, SourceError> {
    if fs::metadata(path).is_ok_and(|metadata| metadata.len() > LARGEST_FILE) {
        return Err(SourceError::TooLarge {
            path: path.to_owned(),
        });
    }
    let bytes = fs::read(path).map_err(|source| SourceError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let text = String::from_utf8(bytes).map_err(|error| SourceError::NotText {
        path: path.to_owned(),
        valid_up_to: error.utf8_error().valid_up_to(),
    })?;
    Ok(SourceFile {
        name: path.display().to_string(),
        text,
    })
}
