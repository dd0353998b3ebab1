// Moving and summing pages.
#include "simt.h"

// kv_copy_pages copies n pages of bytes (a multiple of 16, at aligned addresses) from src[i] to dst[i]. Any grid; the
// entries are spread over it, and four independent loads are in flight in each thread.
KERNEL void kv_copy_pages(const u64 *src, const u64 *dst, u32 n, u32 bytes) {
  u32 words = bytes / 16;
  for (u32 page = block_x(); page < n; page += grid_x()) {
    const u8 *from = (const u8 *)src[page];
    u8 *to = (u8 *)dst[page];
    u32 i = tid();
    for (; i + 3 * threads() < words; i += 4 * threads()) {
      vec16 v[4];
#pragma unroll
      for (u32 j = 0; j < 4; j++) v[j] = load16(from + 16 * (u64)(i + j * threads()));
#pragma unroll
      for (u32 j = 0; j < 4; j++) store16(to + 16 * (u64)(i + j * threads()), v[j]);
    }
    for (; i < words; i += threads()) store16(to + 16 * (u64)i, load16(from + 16 * (u64)i));
  }
}

// XXH3-64. The lengths that occur are 8 bytes and more, multiples of 8.

#define P32_1 0x9E3779B1ull
#define P32_2 0x85EBCA77ull
#define P32_3 0xC2B2AE3Dull
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define P64_5 0x27D4EB2F165667C5ull
#define MX1 0x165667919E3779F9ull
#define MX2 0x9FB21C651E98DF25ull

TABLE u64 secret_words[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

// secret reads 8 bytes of the secret at any offset up to 184.
DEVICE u64 secret(u32 at) {
  u32 word = at / 8, shift = at % 8 * 8;
  if (shift == 0) return secret_words[word];
  return secret_words[word] >> shift | secret_words[word + 1] << (64 - shift);
}

DEVICE u64 mul_fold(u64 a, u64 b) {
  unsigned __int128 p = (unsigned __int128)a * b;
  return (u64)p ^ (u64)(p >> 64);
}

DEVICE u64 avalanche(u64 h) {
  h = (h ^ h >> 37) * MX1;
  return h ^ h >> 32;
}

DEVICE u64 mix16(const u64 *p, u32 at, u64 seed) {
  return mul_fold(p[0] ^ (secret(at) + seed), p[1] ^ (secret(at + 8) - seed));
}

// xxh3_short hashes 8 to 240 bytes.
DEVICE u64 xxh3_short(const u64 *p, u32 len, u64 seed) {
  const u8 *b = (const u8 *)p;
  const u64 *end16 = (const u64 *)(b + len - 16);
  if (len <= 8) { // exactly 8: as two 32-bit halves
    u64 s = seed ^ (u64)__builtin_bswap32((u32)seed) << 32;
    u64 x = (p[0] >> 32 | p[0] << 32) ^ ((secret(8) ^ secret(16)) - s);
    x ^= (x << 49 | x >> 15) ^ (x << 24 | x >> 40);
    x *= MX2;
    x ^= (x >> 35) + len;
    x *= MX2;
    return x ^ x >> 28;
  }
  if (len <= 16) {
    u64 lo = p[0] ^ ((secret(24) ^ secret(32)) + seed);
    u64 hi = end16[1] ^ ((secret(40) ^ secret(48)) - seed);
    return avalanche(len + __builtin_bswap64(lo) + hi + mul_fold(lo, hi));
  }
  u64 acc = len * P64_1;
  if (len <= 128) {
    for (u32 i = (len - 1) / 32;; i--) {
      acc += mix16(p + 2 * i, 32 * i, seed) + mix16(end16 - 2 * i, 32 * i + 16, seed);
      if (i == 0) break;
    }
    return avalanche(acc);
  }
  for (u32 i = 0; i < 8; i++) acc += mix16(p + 2 * i, 16 * i, seed);
  acc = avalanche(acc);
  for (u32 i = 8; i < len / 16; i++) acc += mix16(p + 2 * i, 16 * (i - 8) + 3, seed);
  return avalanche(acc + mix16(end16, 136 - 17, seed));
}

// seeded is the secret of a seeded long hash, of which 8 bytes are read at a multiple of 8 or elsewhere.
DEVICE u64 seeded_word(u32 word, u64 seed) { return word % 2 ? secret_words[word] - seed : secret_words[word] + seed; }

DEVICE u64 seeded(u32 at, u64 seed) {
  u32 word = at / 8, shift = at % 8 * 8;
  if (shift == 0) return seeded_word(word, seed);
  return seeded_word(word, seed) >> shift | seeded_word(word + 1, seed) << (64 - shift);
}

DEVICE u64 initial(u32 lane) {
  switch (lane) {
  case 0: return P32_3;
  case 1: return P64_1;
  case 2: return P64_2;
  case 3: return P64_3;
  case 4: return P64_4;
  case 5: return P32_2;
  case 6: return P64_5;
  }
  return P32_1;
}

// stripe is what lane gets from the 64 bytes at p with the secret at at.
DEVICE u64 stripe(const u64 *p, u32 lane, u64 key_secret) {
  u64 key = p[lane] ^ key_secret;
  return (key & 0xffffffffull) * (key >> 32) + p[lane ^ 1];
}

DEVICE u64 scramble(u64 acc, u64 key) { return (acc ^ acc >> 47 ^ key) * P32_1; }

// merge turns the eight lanes into the hash.
DEVICE u64 merge(const u64 *acc, u64 len, u64 seed) {
  u64 h = len * P64_1;
  for (u32 i = 0; i < 4; i++)
    h += mul_fold(acc[2 * i] ^ seeded(11 + 16 * i, seed), acc[2 * i + 1] ^ seeded(19 + 16 * i, seed));
  return avalanche(h);
}

// xxh3_long hashes more than 240 bytes in one thread.
DEVICE u64 xxh3_long(const u64 *p, u32 len, u64 seed) {
  u64 acc[8];
  for (u32 lane = 0; lane < 8; lane++) acc[lane] = initial(lane);
  u32 stripes = (len - 1) / 64;
  for (u32 s = 0; s < stripes; s++) {
    for (u32 lane = 0; lane < 8; lane++) acc[lane] += stripe(p + 8 * s, lane, seeded(8 * (s % 16 + lane), seed));
    if (s % 16 == 15)
      for (u32 lane = 0; lane < 8; lane++) acc[lane] = scramble(acc[lane], seeded(128 + 8 * lane, seed));
  }
  const u64 *last = (const u64 *)((const u8 *)p + len - 64);
  for (u32 lane = 0; lane < 8; lane++) acc[lane] += stripe(last, lane, seeded(121 + 8 * lane, seed));
  return merge(acc, len, seed);
}

#define CHUNK 65536u
#define BLOCK 1024u // bytes between two scrambles

// kv_sum_chunks hashes every chunk of 64 KiB of every page: sums[page * chunks + chunk]. Grid (chunks of a page, pages),
// 128 threads. The additions of a block commute, so threads share them out; only the scrambles are a chain.
KERNEL void kv_sum_chunks(const u64 *pages, u64 page_bytes, u64 *sums) {
  SHARED u64 part[(CHUNK / BLOCK) * 8];
  SHARED u64 lanes[8];
  u64 from = (u64)block_x() * CHUNK;
  u32 len = (u32)(page_bytes - from < CHUNK ? page_bytes - from : CHUNK);
  const u64 *p = (const u64 *)(pages[block_y()] + from);
  u64 *out = sums + (u64)block_y() * grid_x() + block_x();
  if (len <= 240) {
    if (tid() == 0) *out = xxh3_short(p, len, 0);
    return;
  }
  u32 stripes = (len - 1) / 64, blocks = (stripes + 15) / 16;
  for (u32 i = tid(); i < blocks * 8; i += threads()) {
    u32 block = i / 8, lane = i % 8, end = stripes - block * 16 < 16 ? stripes - block * 16 : 16;
    u64 acc = 0;
    for (u32 s = 0; s < end; s++) acc += stripe(p + block * (BLOCK / 8) + 8 * s, lane, secret_words[s + lane]);
    part[i] = acc;
  }
  barrier();
  if (tid() < 8) {
    u32 lane = tid();
    u64 acc = initial(lane);
    for (u32 b = 0; b < blocks; b++) {
      acc += part[b * 8 + lane];
      if (stripes - b * 16 >= 16) acc = scramble(acc, secret_words[16 + lane]);
    }
    const u64 *last = (const u64 *)((const u8 *)p + len - 64);
    lanes[lane] = acc + stripe(last, lane, secret(121 + 8 * lane));
  }
  barrier();
  if (tid() == 0) *out = merge(lanes, len, 0);
}

// kv_sum_pages hashes the chunk sums of each page, seeded with the page's length. One thread for a page.
KERNEL void kv_sum_pages(const u64 *sums, u32 chunks, u64 page_bytes, u32 n, u64 *out) {
  for (u32 page = block_x() * threads() + tid(); page < n; page += grid_x() * threads()) {
    const u64 *p = sums + (u64)page * chunks;
    out[page] = chunks * 8 <= 240 ? xxh3_short(p, chunks * 8, page_bytes) : xxh3_long(p, chunks * 8, page_bytes);
  }
}
