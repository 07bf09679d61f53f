// Gradient of softmax attention by the queries, over tiles of keys, the weights computed again from the logits and their log-sum-exp.
// A threadgroup has one head and ROWS queries, 8 to a simdgroup; of each 8 x 8 block of a matrix a lane has two neighbours of one row.
//
//   G = do v^T                                (8, KEYS)
//   S = scale q k^T log2(e)                   (8, KEYS)    then softcap, bias, mask
//   W = 2^(S - lse log2(e))                   SIGNED: 2^(|S| - lse log2(e)) with the sign of S
//   dS = |W| G - W delta                      (8, KEYS)    0 where W is, whatever G is
//   dq = scale sum (dS slope) k               (8, D)       slope of the softcap; a sum of its own for each tile
//
// q (bq, n, D), k (bk, m, D), v (bv, m, E), dout (bdo, n, E), bias and mask (b, n or 1, m or 1); lse and delta = <do, out> (heads, n).
// of (7, heads): which of the b a head uses, as forward (its sink is not read), and of dout.
// sizes: n, m, low, high, bias rows, bias columns, mask rows, mask columns.  factors: scale log2(e), softcap log2(e), scale.
// dq (heads, n, D);  dbias (heads, n, m) where DBIAS, zero before: tiles that lie outside the band are not visited.

constexpr int PITCH = (D > E ? D : E) + 16 / int(sizeof(T));      // rows of a tile begin in different banks
threadgroup T tile[KEYS * PITCH];
threadgroup bool broken[SIMDS];

const int n = sizes[0], m = sizes[1], low = sizes[2], high = sizes[3];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int thread_at = simd * 32 + lane;
const int head = threadgroup_position_in_grid.y, i0 = threadgroup_position_in_grid.x * ROWS;
const int heads = threadgroups_per_grid.y;
const int row = (lane / 4 & 4) + lane / 2 % 4, col = (lane / 4 & 2) * 2 + lane % 2 * 2;
const int i = i0 + 8 * simd + row, inside = min(i, n - 1);
const auto queries = q + (size_t(of[head]) * n + inside) * D;
const auto cotangents = dout + (size_t(of[6 * heads + head]) * n + inside) * E;
const auto keys = k + size_t(of[heads + head]) * m * D;
const auto values = v + size_t(of[2 * heads + head]) * m * E;
const size_t bias_at = (size_t(of[3 * heads + head]) * sizes[4] + (sizes[4] > 1 ? inside : 0)) * sizes[5];
const size_t mask_at = (size_t(of[4 * heads + head]) * sizes[6] + (sizes[6] > 1 ? inside : 0)) * sizes[7];
const float L = lse[size_t(head) * n + inside], middle = delta[size_t(head) * n + inside];

simdgroup_matrix<float, 8, 8> S[KEYS / 8], G[KEYS / 8], acc[D / 8];
for (int c = 0; c < D / 8; c++) {
  acc[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

const int j_end = min(m, min(i0 + ROWS, n) + high);
for (int j0 = max(0, i0 + low) / KEYS * KEYS; j0 < j_end; j0 += KEYS) {
  for (int t = thread_at; t < KEYS * E; t += 32 * SIMDS) {
    tile[t / E * PITCH + t % E] = j0 + t / E < m ? values[size_t(j0) * E + t] : T(0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int b = 0; b < KEYS / 8; b++) {
    S[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    G[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int c = 0; c < E / 8; c++) {                  // rows of do and q are read for each tile: registers are what runs out
    simdgroup_matrix<float, 8, 8> O, V;
    O.thread_elements()[0] = float(cotangents[8 * c + col]);
    O.thread_elements()[1] = float(cotangents[8 * c + col + 1]);
    for (int b = 0; b < KEYS / 8; b++) {
      V.thread_elements()[0] = float(tile[(8 * b + col) * PITCH + 8 * c + row]);
      V.thread_elements()[1] = float(tile[(8 * b + col + 1) * PITCH + 8 * c + row]);
      simdgroup_multiply_accumulate(G[b], O, V, G[b]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  bool unclean = false;
  for (int t = thread_at; t < KEYS * D; t += 32 * SIMDS) {
    const T x = j0 + t / D < m ? keys[size_t(j0) * D + t] : T(0);
    unclean = unclean || !isfinite(float(x));
    tile[t / D * PITCH + t % D] = x;
  }
  unclean = simd_any(unclean);
  if (lane == 0) {
    broken[simd] = unclean;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int c = 0; c < D / 8; c++) {
    simdgroup_matrix<float, 8, 8> Q, K;
    Q.thread_elements()[0] = float(queries[8 * c + col]);
    Q.thread_elements()[1] = float(queries[8 * c + col + 1]);
    for (int b = 0; b < KEYS / 8; b++) {
      K.thread_elements()[0] = float(tile[(8 * b + col) * PITCH + 8 * c + row]);
      K.thread_elements()[1] = float(tile[(8 * b + col + 1) * PITCH + 8 * c + row]);
      simdgroup_multiply_accumulate(S[b], Q, K, S[b]);
    }
  }

  uint seen = 0;                                     // a bit for each of the lane's logits
  for (int b = 0; b < KEYS / 8; b++) {
    for (int e = 0; e < 2; e++) {
      const int j = j0 + 8 * b + col + e;
      const float x = S[b].thread_elements()[e] * factors[0];
      const float bend = CAPPED ? tanh(x / factors[1]) : 0.0f;
      const bool sees = j < m && j >= i + low && j <= i + high && (!MASKED || mask[mask_at + (sizes[7] > 1 ? min(j, m - 1) : 0)]);
      float s = CAPPED ? factors[1] * bend : x;
      s = BIASED ? s + bias[bias_at + (sizes[5] > 1 ? min(j, m - 1) : 0)] * M_LOG2E_F : s;
      const float sign = !SIGNED || s > 0.0f ? 1.0f : s < 0.0f ? -1.0f : s;      // NaN stays NaN
      const float w = sees && L != -INFINITY ? sign * exp2(fma(-M_LOG2E_F, L, SIGNED ? abs(s) : s)) : 0.0f;
      const float ds = w == 0.0f ? 0.0f : w * (sign * G[b].thread_elements()[e] - middle);
      if (DBIAS && i < n && j < m) {
        dbias[(size_t(head) * n + i) * m + j] = ds;
      }
      seen |= uint(sees) << (2 * b + e);
      S[b].thread_elements()[e] = ds == 0.0f ? 0.0f : ds * (1.0f - bend * bend);
    }
  }

  bool clean = true;
  for (int s = 0; s < SIMDS; s++) {
    clean = clean && !broken[s];
  }
  for (int c = 0; c < D / 8; c++) {
    simdgroup_matrix<float, 8, 8> R = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), K;
    if (clean) {
      for (int b = 0; b < KEYS / 8; b++) {
        K.thread_elements()[0] = float(tile[(8 * b + row) * PITCH + 8 * c + col]);
        K.thread_elements()[1] = float(tile[(8 * b + row) * PITCH + 8 * c + col + 1]);
        simdgroup_multiply_accumulate(R, S[b], K, R);
      }
    } else {                                         // 0 * NaN is NaN: what a query does not see is left out
      for (int b = 0; b < KEYS / 8; b++) {
        for (int key = 0; key < 8; key++) {
          const int other = (lane & ~9) | (key / 2 & 1) | (key / 4) << 3;
          const float ds = simd_shuffle(S[b].thread_elements()[key % 2], other);
          const bool sees = simd_shuffle(seen, other) >> (2 * b + key % 2) & 1;
          for (int e = 0; e < 2; e++) {
            R.thread_elements()[e] += sees ? ds * float(tile[(8 * b + key) * PITCH + 8 * c + col + e]) : 0.0f;
          }
        }
      }
    }
    for (int e = 0; e < 2; e++) {
      acc[c].thread_elements()[e] += R.thread_elements()[e];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

if (i < n) {
  for (int c = 0; c < D / 8; c++) {
    for (int e = 0; e < 2; e++) {
      dq[(size_t(head) * n + i) * D + 8 * c + col + e] = acc[c].thread_elements()[e] * factors[2];
    }
  }
}
