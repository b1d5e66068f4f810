// What the select kernels share: which entries a row may read, and the k best of many scores.
#pragma once

#define DS4_NONE 0x007fffffu  // the order key of minus infinity: never chosen

KERNEL_INLINE uint visible_entries(constant SelectParams& a, uint i) { return (a.position + i + 1) / a.ratio; }

KERNEL_INLINE bool blocks_wanted(constant SelectParams& a, uint i) {
  return a.makes != 0 && visible_entries(a, i) > a.n_blocks * a.block;
}

// Places of a row: its visible entries, or those of its given blocks, which are in ascending order, one block after the
// other. So only the last block can be cut short, and place j is entry j % block of given block j / block.
KERNEL_INLINE uint places(constant SelectParams& a, device const int* blocks, device const int* n_use, uint i) {
  const uint seen = visible_entries(a, i);
  if (a.uses == 0) return seen;
  device const int* mine = blocks + i * a.n_blocks;
  uint n = uint(n_use[i]);
  while (n > 0 && uint(mine[n - 1]) * a.block >= seen) --n;
  if (n == 0) return 0;
  const uint last = uint(mine[n - 1]) * a.block, rest = seen - last;
  return (n - 1) * a.block + (rest < a.block ? rest : a.block);
}

KERNEL_INLINE uint entry_of(constant SelectParams& a, device const int* blocks, uint i, uint place) {
  if (a.uses == 0) return place;
  return uint(blocks[i * a.n_blocks + place / a.block]) * a.block + place % a.block;
}

// Nothing to choose: all of them, unscored.
KERNEL_INLINE bool takes_all(constant SelectParams& a, uint i, uint m) {
  return m <= a.topk && !blocks_wanted(a, i) && a.shows == 0;
}

// ---------------------------------------------------------------- the k best
//
// Keys in the order of docs/numerics.md. A cut says which are chosen: those above `key`, and the first `ties` equal to it.

struct Cut {
  uint key;
  uint ties;
};

// One threadgroup's place and memory.
struct Team {
  threadgroup uint* bins;    // [CHOOSE_BINS]
  threadgroup uint* list;    // [CHOOSE_LIST]
  threadgroup uint* sums;    // [3][16]
  threadgroup uint* words;   // [8]
  uint tid, threads, lane, simdgroup;
};

// The largest score of each set of 32.
struct SetKeys {
  device const uint* maxima;
  uint key(uint t) const { return maxima[t]; }
};

// The scores of listed sets, or of all.
struct ScoreKeys {
  device const float* scores;
  threadgroup const uint* list;
  uint m;
  bool all;
  uint index(uint t) const { return all ? t : list[t / 32] * 32 + t % 32; }
  uint key(uint t) const {
    const uint j = index(t);
    return j < m ? ds4_order_key(scores[j]) : 0u;
  }
};

// The bin that holds the rank-th largest key, by one simdgroup: words = bin, rank inside it, members.
KERNEL_INLINE void find_bin(Team team, uint rank) {
  threadgroup const uint* mine = team.bins + team.lane * (CHOOSE_BINS / 32);
  uint sum = 0;
  for (uint b = 0; b < CHOOSE_BINS / 32; ++b) sum += mine[b];
  const uint above = simd_sum(sum) - simd_prefix_exclusive_sum(sum) - sum;  // in the bins of later lanes
  if (above < rank && rank <= above + sum) {
    uint left = rank - above, b = CHOOSE_BINS / 32 - 1;
    while (mine[b] < left) left -= mine[b--];
    team.words[0] = team.lane * (CHOOSE_BINS / 32) + b;
    team.words[1] = left;
    team.words[2] = mine[b];
  }
}

// CHOOSE_BATCH keys `step` apart, 0 past the end (no key that counts): all on the way before the first is looked at.
template <class Keys>
KERNEL_INLINE void load_keys(Keys keys, uint t, uint step, uint n, thread uint* k) {
  for (uint b = 0; b < CHOOSE_BATCH; ++b) k[b] = t + b * step < n ? keys.key(t + b * step) : 0u;
}

// The cut that leaves the `rank` best of the n keys of at least `floor`, or all of those if they are no more than that.
// Histograms of the range that is left, ten bits at a time: the range, not the whole key, so that scores spread over bins.
template <class Keys>
KERNEL_INLINE Cut find_cut(Keys keys, uint n, uint rank, uint floor, Team team) {
  uint low = 0xffffffffu, high = 0, live = 0;
  for (uint t = team.tid; t < n; t += CHOOSE_BATCH * team.threads) {
    uint k[CHOOSE_BATCH];
    load_keys(keys, t, team.threads, n, k);
    for (uint b = 0; b < CHOOSE_BATCH; ++b)
      if (k[b] >= floor) {
        low = min(low, k[b]);
        high = max(high, k[b]);
        ++live;
      }
  }
  low = simd_min(low);
  high = simd_max(high);
  live = simd_sum(live);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (team.lane == 0) {
    team.sums[team.simdgroup] = low;
    team.sums[16 + team.simdgroup] = high;
    team.sums[32 + team.simdgroup] = live;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  live = 0;
  for (uint s = 0; s < team.threads / 32; ++s) {
    low = min(low, team.sums[s]);
    high = max(high, team.sums[16 + s]);
    live += team.sums[32 + s];
  }
  Cut cut;
  cut.key = floor - 1;
  cut.ties = 0;
  bool searching = live > rank;
  while (searching) {
    const uint bits = 32 - clz(high - low), shift = bits > 10 ? bits - 10 : 0;
    for (uint b = team.tid; b < CHOOSE_BINS; b += team.threads) team.bins[b] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = team.tid; t < n; t += CHOOSE_BATCH * team.threads) {
      uint k[CHOOSE_BATCH];
      load_keys(keys, t, team.threads, n, k);
      for (uint b = 0; b < CHOOSE_BATCH; ++b)
        if (k[b] >= low && k[b] <= high)
          atomic_fetch_add_explicit((threadgroup atomic_uint*)(team.bins + ((k[b] - low) >> shift)), 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (team.simdgroup == 0) find_bin(team, rank);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint bin = team.words[0], members = team.words[2];
    rank = team.words[1];
    low += bin << shift;
    high = min(high, low + ((1u << shift) - 1u));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (members == rank) {  // the whole bin
      cut.key = low - 1;
      searching = false;
    } else if (shift == 0) {
      cut.key = low;
      cut.ties = rank;
      searching = false;
    }
  }
  return cut;
}

// Calls sink.put(place, t) for every chosen t in ascending order, place counting from 0; returns how many there are.
template <class Keys, class Sink>
KERNEL_INLINE uint write_chosen(Keys keys, uint n, Cut cut, Sink sink, Team team) {
  uint more = 0, same = 0;  // before this round: keys above the cut, keys equal to it
  for (uint t0 = 0; t0 < n; t0 += CHOOSE_BATCH * team.threads) {
    const uint first = t0 + CHOOSE_BATCH * team.tid;  // a thread has neighbours, so one count over the threads places them all
    uint k[CHOOSE_BATCH], flags = 0;
    load_keys(keys, first, 1, n, k);
    for (uint b = 0; b < CHOOSE_BATCH; ++b) flags += (k[b] > cut.key ? 1u : 0u) + (cut.ties > 0 && k[b] == cut.key ? 0x10000u : 0u);
    const uint before_lane = simd_prefix_exclusive_sum(flags);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (team.lane == 31) team.sums[team.simdgroup] = before_lane + flags;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint before = before_lane, all = 0;
    for (uint s = 0; s < team.threads / 32; ++s) {
      const uint v = team.sums[s];
      before += s < team.simdgroup ? v : 0u;
      all += v;
    }
    uint more_before = more + (before & 0xffffu), same_before = same + (before >> 16);
    for (uint b = 0; b < CHOOSE_BATCH; ++b) {
      const bool above = k[b] > cut.key, equal = cut.ties > 0 && k[b] == cut.key;
      if (above || (equal && same_before < cut.ties)) sink.put(more_before + min(same_before, cut.ties), first + b);
      more_before += above ? 1u : 0u;
      same_before += equal ? 1u : 0u;
    }
    more += all & 0xffffu;
    same += all >> 16;
  }
  return more + min(same, cut.ties);
}

struct ListSink {
  threadgroup uint* list;
  void put(uint place, uint t) const {
    if (place < CHOOSE_LIST) list[place] = t;
  }
};

// The k best of m scores, whose sets of 32 have these maxima, into the sink in ascending order; returns how many.
// Bounded: the k-th largest set maximum is a lower bound of the k-th best score, because k sets hold a score as good. Only
// sets that reach it can hold one of the best, and they are about k. If too many reach it (equal scores), all are read.
template <class Sink>
KERNEL_INLINE uint write_best(device const float* scores, device const uint* maxima, uint m, uint k, Sink sink, Team team) {
  const uint n_sets = (m + 31) / 32;
  ScoreKeys keys;
  keys.scores = scores;
  keys.list = team.list;
  keys.m = m;
  keys.all = true;
  uint n = m, floor = DS4_NONE + 1;
  if (n_sets > k) {
    SetKeys sets;
    sets.maxima = maxima;
    Cut bound = find_cut(sets, n_sets, k, floor, team);
    if (bound.ties > 0) {  // take all sets that equal the bound
      bound.key -= 1;
      bound.ties = 0;
    }
    ListSink into;
    into.list = team.list;
    const uint listed = write_chosen(sets, n_sets, bound, into, team);
    if (listed <= CHOOSE_LIST) {
      keys.all = false;
      n = listed * 32;
      floor = bound.key + 1;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const Cut cut = find_cut(keys, n, k, floor, team);
  Sink out = sink;
  out.keys = keys;
  return write_chosen(keys, n, cut, out, team);
}
