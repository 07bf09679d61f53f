// Gradients of softmax attention by the keys and the values, over tiles of queries; a threadgroup has one head and KEYS keys, 8 to a
// simdgroup. Everything is tiles_backward_queries.metal turned, so that a row of W^T belongs to the simdgroup that adds its products.
//
//   S^T = scale k q^T log2(e)                 (8, ROWS)    then softcap, bias, mask
//   G^T = v do^T                              (8, ROWS)
//   W^T = 2^(S^T - lse log2(e))               SIGNED: 2^(|S^T| - lse log2(e)) with the sign of S^T
//   dS^T = |W|^T G^T - W^T delta              (8, ROWS)    0 where W is, whatever G is
//   dv = sum W^T do                           (8, E)       a sum of its own for each tile
//   dk = scale sum (dS slope)^T q             (8, D)       slope of the softcap
//
// Inputs as there.  dk (heads, m, D), dv (heads, m, E).

constexpr int Q_PITCH = D + 16 / int(sizeof(T)), DO_PITCH = E + 16 / int(sizeof(T));      // rows of a tile begin in different banks
threadgroup T q_tile[ROWS * Q_PITCH];
threadgroup T do_tile[ROWS * DO_PITCH];
threadgroup bool broken[SIMDS];

const int n = sizes[0], m = sizes[1], low = sizes[2], high = sizes[3];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int thread_at = simd * 32 + lane;
const int head = threadgroup_position_in_grid.y, j0 = threadgroup_position_in_grid.x * KEYS;
const int heads = threadgroups_per_grid.y;
const int row = (lane / 4 & 4) + lane / 2 % 4, col = (lane / 4 & 2) * 2 + lane % 2 * 2;
const int j = j0 + 8 * simd + row, inside = min(j, m - 1);
const auto queries = q + size_t(of[head]) * n * D;
const auto cotangents = dout + size_t(of[6 * heads + head]) * n * E;
const auto keys = k + (size_t(of[heads + head]) * m + inside) * D;
const auto values = v + (size_t(of[2 * heads + head]) * m + inside) * E;
const size_t bias_at = size_t(of[3 * heads + head]) * sizes[4] * sizes[5] + (sizes[5] > 1 ? inside : 0);
const size_t mask_at = size_t(of[4 * heads + head]) * sizes[6] * sizes[7] + (sizes[7] > 1 ? inside : 0);

simdgroup_matrix<float, 8, 8> S[ROWS / 8], W[ROWS / 8], acc[(D + E) / 8];      // of dk, then of dv
for (int c = 0; c < (D + E) / 8; c++) {
  acc[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

const int i_end = min(n, min(j0 + KEYS, m) - low);
for (int i0 = max(0, j0 - high) / ROWS * ROWS; i0 < i_end; i0 += ROWS) {
  bool unclean = false;
  for (int t = thread_at; t < ROWS * D; t += 32 * SIMDS) {
    const T x = i0 + t / D < n ? queries[size_t(i0) * D + t] : T(0);
    unclean = unclean || !isfinite(float(x));
    q_tile[t / D * Q_PITCH + t % D] = x;
  }
  for (int t = thread_at; t < ROWS * E; t += 32 * SIMDS) {
    const T x = i0 + t / E < n ? cotangents[size_t(i0) * E + t] : T(0);
    unclean = unclean || !isfinite(float(x));
    do_tile[t / E * DO_PITCH + t % E] = x;
  }
  unclean = simd_any(unclean);
  if (lane == 0) {
    broken[simd] = unclean;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int b = 0; b < ROWS / 8; b++) {
    S[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    W[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int c = 0; c < D / 8; c++) {                  // rows of k and v are read for each tile: registers are what runs out
    simdgroup_matrix<float, 8, 8> K, Q;
    K.thread_elements()[0] = float(keys[8 * c + col]);
    K.thread_elements()[1] = float(keys[8 * c + col + 1]);
    for (int b = 0; b < ROWS / 8; b++) {
      Q.thread_elements()[0] = float(q_tile[(8 * b + col) * Q_PITCH + 8 * c + row]);
      Q.thread_elements()[1] = float(q_tile[(8 * b + col + 1) * Q_PITCH + 8 * c + row]);
      simdgroup_multiply_accumulate(S[b], K, Q, S[b]);
    }
  }
  for (int c = 0; c < E / 8; c++) {                  // G^T, until the weights take its place
    simdgroup_matrix<float, 8, 8> V, O;
    V.thread_elements()[0] = float(values[8 * c + col]);
    V.thread_elements()[1] = float(values[8 * c + col + 1]);
    for (int b = 0; b < ROWS / 8; b++) {
      O.thread_elements()[0] = float(do_tile[(8 * b + col) * DO_PITCH + 8 * c + row]);
      O.thread_elements()[1] = float(do_tile[(8 * b + col + 1) * DO_PITCH + 8 * c + row]);
      simdgroup_multiply_accumulate(W[b], V, O, W[b]);
    }
  }

  uint seen = 0;                                     // a bit for each of the lane's logits
  for (int b = 0; b < ROWS / 8; b++) {
    for (int e = 0; e < 2; e++) {
      const int i = i0 + 8 * b + col + e, query = min(i, n - 1);
      const float x = S[b].thread_elements()[e] * factors[0];
      const float bend = CAPPED ? tanh(x / factors[1]) : 0.0f;
      const bool allowed = !MASKED || mask[mask_at + (sizes[6] > 1 ? size_t(query) * sizes[7] : 0)];
      const bool sees = allowed && i < n && j < m && j >= i + low && j <= i + high;
      float s = CAPPED ? factors[1] * bend : x;
      s = BIASED ? s + bias[bias_at + (sizes[4] > 1 ? size_t(query) * sizes[5] : 0)] * M_LOG2E_F : s;
      const float sign = !SIGNED || s > 0.0f ? 1.0f : s < 0.0f ? -1.0f : s;      // NaN stays NaN
      const float L = lse[size_t(head) * n + query], middle = delta[size_t(head) * n + query];
      const float w = sees && L != -INFINITY ? sign * exp2(fma(-M_LOG2E_F, L, SIGNED ? abs(s) : s)) : 0.0f;
      const float ds = w == 0.0f ? 0.0f : w * (sign * W[b].thread_elements()[e] - middle);
      seen |= uint(sees) << (2 * b + e);
      W[b].thread_elements()[e] = w;
      S[b].thread_elements()[e] = ds == 0.0f ? 0.0f : ds * (1.0f - bend * bend);
    }
  }

  bool clean = true;
  for (int s = 0; s < SIMDS; s++) {
    clean = clean && !broken[s];
  }
  for (int c = 0; c < (D + E) / 8; c++) {
    const bool of_value = c >= D / 8;
    const threadgroup T* block = of_value ? do_tile + 8 * c - D : q_tile + 8 * c;
    const int pitch = of_value ? DO_PITCH : Q_PITCH;
    simdgroup_matrix<float, 8, 8> R = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), X;
    if (clean) {
      for (int b = 0; b < ROWS / 8; b++) {
        X.thread_elements()[0] = float(block[(8 * b + row) * pitch + col]);
        X.thread_elements()[1] = float(block[(8 * b + row) * pitch + col + 1]);
        simdgroup_multiply_accumulate(R, of_value ? W[b] : S[b], X, R);
      }
    } else {                                         // 0 * NaN is NaN: what a query does not see is left out
      for (int b = 0; b < ROWS / 8; b++) {
        for (int query = 0; query < 8; query++) {
          const int other = (lane & ~9) | (query / 2 & 1) | (query / 4) << 3;
          const float w = simd_shuffle(of_value ? W[b].thread_elements()[query % 2] : S[b].thread_elements()[query % 2], other);
          const bool sees = simd_shuffle(seen, other) >> (2 * b + query % 2) & 1;
          for (int e = 0; e < 2; e++) {
            R.thread_elements()[e] += sees ? w * float(block[(8 * b + query) * pitch + col + e]) : 0.0f;
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

if (j < m) {
  for (int c = 0; c < D / 8; c++) {
    for (int e = 0; e < 2; e++) {
      dk[(size_t(head) * m + j) * D + 8 * c + col + e] = acc[c].thread_elements()[e] * factors[2];
    }
  }
  for (int c = 0; c < E / 8; c++) {
    for (int e = 0; e < 2; e++) {
      dv[(size_t(head) * m + j) * E + 8 * c + col + e] = acc[D / 8 + c].thread_elements()[e];
    }
  }
}
