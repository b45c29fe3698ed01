//! The sharded map. It is dashmap's; built with `--cfg shuttle` it is a stand-in of the same shape whose locks a model checker
//! controls.

#[cfg(not(shuttle))]
pub(super) use dashmap::{DashMap, RwLockWriteGuard};

#[cfg(shuttle)]
pub(super) use self::model::{DashMap, RwLockWriteGuard};

pub(super) use dashmap::SharedValue;

#[cfg(shuttle)]
mod model {
    use std::hash::{BuildHasher, Hash};

    use dashmap::SharedValue;
    use hashbrown::raw::RawTable;
    pub(in super::super) use shuttle::sync::RwLockWriteGuard;
    use shuttle::sync::{RwLock, RwLockReadGuard};

    /// So many shards make two keys meet in one and others not.
    const SHARDS: usize = 4;

    #[derive(Debug)]
    pub(in super::super) struct DashMap<K, V, S> {
        shards: Box<[Shard<K, V>]>,
        hasher: S,
    }

    type Table<K, V> = RawTable<(K, SharedValue<V>)>;

    pub(in super::super) struct Shard<K, V>(RwLock<Table<K, V>>);

    impl<K, V> std::fmt::Debug for Shard<K, V> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Shard")
        }
    }

    impl<K: Hash + Eq, V, S: BuildHasher> DashMap<K, V, S> {
        pub(in super::super) fn with_hasher_and_shard_amount(hasher: S, _: usize) -> Self {
            let shards = (0..SHARDS).map(|_| Shard(RwLock::new(Table::new())));
            DashMap {
                shards: shards.collect(),
                hasher,
            }
        }

        pub(in super::super) fn shards(&self) -> &[Shard<K, V>] {
            &self.shards
        }

        pub(in super::super) fn determine_shard(&self, hash: usize) -> usize {
            (hash >> 32) % SHARDS
        }

        pub(in super::super) fn retain(&self, mut keep: impl FnMut(&K, &mut V) -> bool) {
            for shard in &self.shards {
                let mut table = shard.write();
                let all: Vec<(K, SharedValue<V>)> = table.drain().collect();
                for (key, mut value) in all {
                    if keep(&key, value.get_mut()) {
                        let hash = self.hasher.hash_one(&key);
                        table.insert(hash, (key, value), |(key, _)| self.hasher.hash_one(key));
                    }
                }
            }
        }

        pub(in super::super) fn len(&self) -> usize {
            self.shards.iter().map(|shard| shard.read().len()).sum()
        }

        pub(in super::super) fn is_empty(&self) -> bool {
            self.len() == 0
        }
    }

    impl<K, V> Shard<K, V> {
        pub(in super::super) fn read(&self) -> RwLockReadGuard<'_, Table<K, V>> {
            self.0.read().expect("no thread panics with the lock")
        }

        pub(in super::super) fn write(&self) -> RwLockWriteGuard<'_, Table<K, V>> {
            self.0.write().expect("no thread panics with the lock")
        }
    }
}
