//! Notices that files have changed, by looking at them every now and then.
//!
//! Looking works wherever files can be read: `ConfigMap` and `Secret` mounts and their swaps of links, network file systems,
//! containers that are out of inotify handles. A change is one once it has settled, so that a file that is still being written is
//! not read.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// After how many looks a change is taken up that does not settle.
const MOST_UNSETTLED: u32 = 8;

/// Files, and how they were when they were last taken up.
#[derive(Debug)]
pub(crate) struct FileWatch {
    taken_up: Fingerprint,
    seen: Fingerprint,
    unsettled: u32,
}

/// What is there and when it was changed last.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fingerprint(Vec<(PathBuf, Option<FileFingerprint>)>);

/// Device, file number, size, and the times of the last change of the content and of anything.
type FileFingerprint = [i64; 7];

impl FileWatch {
    /// Watches from how these files are now on; they are to be read after this.
    pub(crate) fn new(files: Vec<PathBuf>) -> Self {
        let fingerprint = Fingerprint::of(files);
        FileWatch {
            taken_up: fingerprint.clone(),
            seen: fingerprint,
            unsettled: 0,
        }
    }

    /// Looks at the files, which may be others by now. Whether they are to be read: they are different from when they last
    /// were, and the same as at the last look.
    ///
    /// Pipes and devices are never news: whoever opens one may wait for ever.
    pub(crate) fn is_news(&mut self, files: Vec<PathBuf>) -> bool {
        let is_special =
            |path: &PathBuf| fs::metadata(path).is_ok_and(|file| !file.is_file() && !file.is_dir());
        if files.iter().any(is_special) {
            return false;
        }
        let now = Fingerprint::of(files);
        if now == self.taken_up {
            self.unsettled = 0;
            self.seen = now;
            return false;
        }
        self.unsettled += 1;
        if now != self.seen && self.unsettled < MOST_UNSETTLED {
            self.seen = now;
            return false;
        }
        self.unsettled = 0;
        self.taken_up = now.clone();
        self.seen = now;
        true
    }
}

impl FileWatch {
    /// Whether the files are still what was news, or what they were at the start. If not, what was read of them meanwhile
    /// may be a mixture; they will be news again.
    pub(crate) fn is_unchanged(&self, files: Vec<PathBuf>) -> bool {
        Fingerprint::of(files) == self.taken_up
    }

    /// Has the files be news again at the next look but one: they could not be read.
    pub(crate) fn try_again(&mut self) {
        self.taken_up = Fingerprint(Vec::new());
    }
}

impl Fingerprint {
    /// What cannot be looked at is noted as such: it is a change when that changes.
    fn of(files: Vec<PathBuf>) -> Self {
        let files = files.into_iter().map(|path| {
            let metadata = fs::metadata(&path).ok().map(|metadata| {
                [
                    metadata.dev().cast_signed(),
                    metadata.ino().cast_signed(),
                    metadata.size().cast_signed(),
                    metadata.mtime(),
                    metadata.mtime_nsec(),
                    metadata.ctime(),
                    metadata.ctime_nsec(),
                ]
            });
            (path, metadata)
        });
        Fingerprint(files.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    /// Watches the files of a directory.
    struct Watch(PathBuf, FileWatch);

    impl Watch {
        fn is_news(&mut self) -> bool {
            self.1.is_news(files(&self.0))
        }
    }

    fn watch(directory: &Path) -> Watch {
        Watch(directory.to_owned(), FileWatch::new(files(directory)))
    }

    fn files(directory: &Path) -> Vec<PathBuf> {
        let names = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> = names
            .filter(|path| !path.to_string_lossy().contains("/.."))
            .collect();
        files.sort();
        files
    }

    #[test]
    fn a_change_is_news_once_it_has_settled() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.yaml");
        fs::write(&file, "domain: a").unwrap();
        let mut watch = watch(directory.path());
        assert!(!watch.is_news());
        fs::write(&file, "domain: ab").unwrap();
        assert_eq!(
            [watch.is_news(), watch.is_news(), watch.is_news()],
            [false, true, false]
        );
        fs::write(&file, "domain: abc").unwrap();
        assert!(!watch.is_news());
        fs::write(&file, "domain: abcd").unwrap();
        assert_eq!(
            [watch.is_news(), watch.is_news(), watch.is_news()],
            [false, true, false]
        );
        fs::remove_file(&file).unwrap();
        assert_eq!([watch.is_news(), watch.is_news()], [false, true]);
    }

    #[test]
    fn what_is_taken_back_before_it_settles_is_no_news() {
        let directory = tempfile::tempdir().unwrap();
        let mut watch = watch(directory.path());
        let temporary = directory.path().join("4913");
        fs::write(&temporary, "").unwrap();
        assert!(!watch.is_news());
        fs::remove_file(&temporary).unwrap();
        assert_eq!([watch.is_news(), watch.is_news()], [false, false]);
    }

    #[test]
    fn what_is_no_file_is_no_news() {
        let directory = tempfile::tempdir().unwrap();
        let mut watch = watch(directory.path());
        let link = directory.path().join("a.yaml");
        symlink("/dev/zero", &link).unwrap();
        assert_eq!([watch.is_news(), watch.is_news()], [false, false]);
        fs::remove_file(&link).unwrap();
        fs::write(&link, "domain: a").unwrap();
        assert_eq!([watch.is_news(), watch.is_news()], [false, true]);
    }

    #[test]
    fn what_never_settles_is_taken_up_all_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.yaml");
        let mut watch = watch(directory.path());
        let looks = (0..MOST_UNSETTLED as usize).map(|i| {
            fs::write(&file, "#".repeat(i)).unwrap();
            watch.is_news()
        });
        assert_eq!(looks.filter(|is_news| *is_news).count(), 1);
    }

    #[test]
    fn a_change_while_they_are_read_is_noticed_and_is_news_again() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a");
        fs::write(&file, "1").unwrap();
        let mut watch = watch(directory.path());
        assert!(watch.1.is_unchanged(files(directory.path())));
        fs::write(&file, "22").unwrap();
        assert_eq!([watch.is_news(), watch.is_news()], [false, true]);
        // Here they would be read.
        assert!(watch.1.is_unchanged(files(directory.path())));
        fs::write(&file, "333").unwrap();
        assert!(!watch.1.is_unchanged(files(directory.path())));
        assert_eq!([watch.is_news(), watch.is_news()], [false, true]);
    }

    #[test]
    fn each_swap_of_a_config_map_is_news() {
        let directory = tempfile::tempdir().unwrap();
        let mount = directory.path();
        let swap = |version: u32| {
            let data = format!("..v{version}");
            fs::create_dir(mount.join(&data)).unwrap();
            fs::write(mount.join(&data).join("rules.yaml"), "domain: d").unwrap();
            symlink(&data, mount.join("..data_tmp")).unwrap();
            fs::rename(mount.join("..data_tmp"), mount.join("..data")).unwrap();
            if version > 0 {
                fs::remove_dir_all(mount.join(format!("..v{}", version - 1))).unwrap();
            }
        };
        swap(0);
        symlink("..data/rules.yaml", mount.join("rules.yaml")).unwrap();
        let mut watch = watch(mount);
        for version in 1..6 {
            swap(version);
            assert_eq!(
                [watch.is_news(), watch.is_news()],
                [false, true],
                "version {version}"
            );
        }
    }
}
